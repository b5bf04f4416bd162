// Makes the replacements of CUDA tensors.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

namespace standin {

void keep_wrapped(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

Tensor alias(const Tensor& tensor, bool is_written) {
  const c10::Storage& memory = tensor.storage();
  void* const data = is_written ? memory.mutable_data() : const_cast<void*>(memory.data());
  // An operator may resize its out=, in memory of the CPU: the result is copied back from there.
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(),
                       c10::DataPtr(data, c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
                       /*resizable=*/true);
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
  keep_wrapped(tensor, result);
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

Tensor to_meta(const Tensor& tensor) {
  // The function behind at::empty_strided, without the way through the dispatcher.
  Tensor result(
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  keep_wrapped(tensor, result);
  return result;
}

Tensor to_zeros(const Tensor& tensor) {
  Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(),
                                    c10::TensorOptions(c10::kCPU).dtype(tensor.dtype()));
  result.zero_();
  keep_wrapped(tensor, result);
  return result;
}

Tensor to_copy(const Tensor& tensor) {
  Tensor result = tensor.clone();
  keep_wrapped(tensor, result);
  return result;
}

std::vector<Tensor> flatten(const Stack& values) {
  std::vector<Tensor> tensors;
  for (const IValue& value : values) {
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(tensor);
      }
    } else {
      tensors.push_back(value.isTensor() ? value.toTensor() : Tensor());
    }
  }
  return tensors;
}

}  // namespace standin
