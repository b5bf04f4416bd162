// An operator's work in a stream.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <optional>

#include "facts.h"
#include "random.h"
#include "tensors.h"

namespace standin {

// Dispatch keys above the backends are already handled when a CUDA kernel is called.
struct BackendOnly {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset | c10::python_ks |
                                           c10::DispatchKeySet(c10::DispatchKey::Functionalize)};
};

struct Deferred {
  const Facts& facts;
  c10::OperatorHandle op;
  const c10::KernelFunction& kernel;  // ours, if torch has none for the CPU
  Stack arguments;                    // on the CPU
  std::vector<Tensor> results;        // where results are copied to, undefined for arguments
  std::optional<Draw> draw;           // of a random operator whose values matter
};

// Enqueues work on the current stream of a device. Errors of work that runs within this call are
// raised here, because a GPU's host checks arguments. Errors of a GPU's kernels fail the device.
void enqueue(Deferred work, c10::Device device);

// Computes results on the CPU now.
Stack compute(const Deferred& work);

// Returns the generator of the operator that this thread computes.
const at::Generator& current_generator();

}  // namespace standin
