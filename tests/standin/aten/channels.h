// Tensors whose dimension 1 is the channel, as the kernels of batch normalization see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace standin {

using OptionalTensor = std::optional<at::Tensor>;

// Returns values of the dtype that CUDA's kernels compute in.
inline at::Tensor wide(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

inline bool is_given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

inline OptionalTensor wide(const OptionalTensor& tensor) {
  return is_given(tensor) ? OptionalTensor(wide(*tensor)) : std::nullopt;
}

// Returns a value for each channel in a shape that broadcasts.
inline at::Tensor as_channels(const at::Tensor& vector, const at::Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = -1;
  return vector.view(shape);
}

// Returns all dimensions but the channels'.
inline std::vector<int64_t> other_dims(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t i = 2; i < input.dim(); ++i) {
    dims.push_back(i);
  }
  return dims;
}

}  // namespace standin
