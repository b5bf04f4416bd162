// An operator's CPU generator is seeded from the CUDA generator of the device.
#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <mutex>

namespace standin {
namespace {

// The generator counts in fours; the number of values does not matter to us.
constexpr uint64_t kIncrement = 4;

// SplitMix64, so that adjacent seeds give unrelated numbers.
uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

}  // namespace

at::Generator make_generator(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

Draw::Draw(const c10::IValue& generator, c10::DeviceIndex device) {
  const std::optional<at::Generator> given =
      generator.isGenerator() ? std::optional<at::Generator>(generator.toGenerator())
                              : std::nullopt;
  auto* const implementation = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      given, at::cuda::detail::getDefaultCUDAGenerator(device));
  const std::lock_guard<std::mutex> lock(implementation->mutex_);
  state_ = implementation->philox_cuda_state(kIncrement);
}

at::Generator Draw::make_generator() const {
  // A replay writes both to memory of the device, which is the host's.
  const uint64_t seed =
      state_.captured_ ? static_cast<uint64_t>(*state_.seed_.ptr) : state_.seed_.val;
  const uint64_t offset =
      state_.captured_ ? static_cast<uint64_t>(*state_.offset_.ptr) + state_.offset_intragraph_
                       : state_.offset_.val;
  return standin::make_generator(mix(seed ^ mix(offset)));
}

}  // namespace standin
