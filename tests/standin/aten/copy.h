// aten::copy_, which torch registers for all devices: most copies are the runtime's, as on a GPU.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "fallback.h"

namespace standin {

class Copy final : public c10::OperatorKernel {
 public:
  explicit Copy(const c10::OperatorHandle& op);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  Fallback fallback_;
};

}  // namespace standin
