// Random numbers of the device.
//
// An operator that draws takes its seed and its place in the sequence from the CUDA generator, when
// it is called, and seeds a generator of the CPU with both when it runs. So torch.manual_seed,
// torch.cuda.get_rng_state and graphs' replays work as on a GPU, the CPU's own generator is not
// used, and the order in which streams run does not matter. The numbers differ from a GPU's.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>
#include <ATen/cuda/PhiloxCudaState.h>

#include <cstdint>

namespace standin {

// Returns a generator of the CPU.
at::Generator make_generator(uint64_t seed);

class Draw {
 public:
  // Takes the next place in the sequence of a generator, by default the device's.
  Draw(const c10::IValue& generator, c10::DeviceIndex device);

  // Returns another generator in each replay of a graph.
  at::Generator make_generator() const;

 private:
  at::PhiloxCudaState state_;
};

}  // namespace standin
