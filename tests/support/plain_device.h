// Shared by the stand-in device's kernels and its backend.
#pragma once

#include <ATen/core/Tensor.h>

namespace plain {

bool is_ours(const at::Tensor& tensor);

// The tensor over the same memory as a tensor of the host; others as they are. Raises for float64
// if the device has none.
at::Tensor to_host(const at::Tensor& tensor);

}  // namespace plain
