// The kernel of every operator of CUDA tensors: shapes come from the operator's meta kernel, memory
// from the caching allocator, and the CPU's operator runs in the stream.
//
// So autograd, autocast, the dispatcher and the allocator are torch's own. The host waits where it
// waits on a GPU: where a shape or a result depends on values.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "facts.h"
#include "shapes.h"
#include "tensors.h"

namespace standin {

class Fallback final : public c10::OperatorKernel {
 public:
  // `kernel` is the operator for the CPU, if torch has none.
  Fallback(const c10::OperatorHandle& op, c10::KernelFunction kernel);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  Stack call(const c10::OperatorHandle& op, Stack arguments) const;
  Stack wait_and_compute(const c10::OperatorHandle& op, const Stack& arguments,
                         c10::Device device) const;

  const Facts facts_;
  const c10::KernelFunction kernel_;
  mutable ShapeFinder shapes_;
};

}  // namespace standin
