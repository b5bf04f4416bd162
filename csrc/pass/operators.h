// The operators of csrc/ops.cpp, by handles that are looked up once.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <utility>

namespace syncbn::pass {

// An operator of any device, called with a value for each of its arguments.
class Operator {
 public:
  explicit Operator(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")) {}

  template <typename... Values>
  torch::jit::Stack operator()(Values&&... values) const {
    torch::jit::Stack stack{c10::IValue(std::forward<Values>(values))...};
    handle_.callBoxed(stack);
    return stack;
  }

  // Whether the operator was compiled for a device; else Python's expressions take its place.
  bool has_kernel(c10::DispatchKey key) const { return handle_.hasKernelForDispatchKey(key); }

 private:
  c10::OperatorHandle handle_;
};

struct Operators {
  Operator batch_norm_stats{"syncbn::batch_norm_stats"};
  Operator batch_norm_apply{"syncbn::batch_norm_apply"};
  Operator batch_norm_backward_reduce{"syncbn::batch_norm_backward_reduce"};
  Operator batch_norm_backward_reduce_dz{"syncbn::batch_norm_backward_reduce_dz"};
  Operator batch_norm_backward_apply{"syncbn::batch_norm_backward_apply"};
  Operator batch_norm_forward{"syncbn::batch_norm_forward"};
  Operator batch_norm_backward{"syncbn::batch_norm_backward"};
  bool has_cuda = batch_norm_stats.has_kernel(c10::DispatchKey::CUDA);
};

inline const Operators& operators() {
  static const Operators all;
  return all;
}

}  // namespace syncbn::pass
