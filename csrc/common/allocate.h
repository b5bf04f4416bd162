// New tensors. The stable ABI's own functions look up an operator by its name in each call: that
// takes longer than the allocation.
#pragma once

#include "stable.h"

namespace syncbn {

// Throws the error of a failed allocation. The CPU and the CUDA library each define it, because the
// stable ABI of torch 2.11 does not pass on the allocator's error. The message of an
// out-of-memory error is torch's: programs search for it and continue with a smaller batch. No
// other error may have that message.
[[noreturn]] void throw_allocation_failed(int64_t num_bytes, const Tensor& like);

inline Tensor allocate(torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       torch::headeronly::IntHeaderOnlyArrayRef strides, ScalarType dtype,
                       const Tensor& like) {
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               code, device_type, like.get_device_index(), &handle);
  if (error != AOTI_TORCH_SUCCESS) {
    int64_t num_bytes = aoti_torch_dtype_element_size(code);
    for (const int64_t size : sizes) {
      num_bytes *= size;
    }
    throw_allocation_failed(num_bytes, like);
  }
  return Tensor(handle);
}

// Uninitialized, with the shape, strides and dtype of `tensor`.
inline Tensor allocate_like(const Tensor& tensor) {
  return allocate(tensor.sizes(), tensor.strides(), tensor.scalar_type(), tensor);
}

// Uninitialized, contiguous, one-dimensional, on the device of `like`.
inline Tensor allocate_vector(int64_t size, ScalarType dtype, const Tensor& like) {
  constexpr int64_t kStride = 1;
  return allocate({&size, 1}, {&kStride, 1}, dtype, like);
}

}  // namespace syncbn
