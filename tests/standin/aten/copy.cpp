// Which copies are torch's own, and which would launch a kernel.
#include "copy.h"

#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>

#include "deferred.h"

namespace standin {
namespace {

bool are_equal_in_memory(const Tensor& one, const Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() && one.is_non_overlapping_and_dense() &&
         one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

// To or from the CPU torch makes dense tensors, and copies these.
bool is_memory_copy(const Tensor& self, const Tensor& source) {
  return !self.is_cuda() || !source.is_cuda() || are_equal_in_memory(self, source);
}

// A kernel of a GPU reads the memory of the other one; the stand-in's work has one device.
Tensor bring(const Tensor& source, const Tensor& self) {
  const c10::cuda::CUDAGuard guard(source.device());
  const Tensor dense = source.to(self.scalar_type()).contiguous().resolve_conj().resolve_neg();
  Tensor result = at::empty_like(dense, dense.options().device(self.device()));
  at::native::copy_(result, dense, false);
  return result;
}

}  // namespace

Copy::Copy(const c10::OperatorHandle& op) : fallback_(op, {}) {}

void Copy::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t last = stack->size() - 1;
  Tensor self = (*stack)[last - 2].toTensor();
  const Tensor source = (*stack)[last - 1].toTensor();
  const BackendOnly guard;
  if (is_memory_copy(self, source)) {
    at::native::copy_(self, source, (*stack)[last].toBool());
    stack->resize(stack->size() - 3);
    stack->emplace_back(std::move(self));
    return;
  }
  if (self.device() != source.device()) {
    (*stack)[last - 1] = bring(source, self);
  }
  fallback_(op, keys, stack);
}

}  // namespace standin
