// One value per channel: weights, biases, running buffers and their gradients are read and written
// as double, whatever their dtype and stride.
#pragma once

#include <optional>
#include <vector>

#include "dispatch.h"

namespace syncbn::cpu {

inline std::vector<double> load_channels(const std::optional<Tensor>& tensor, int64_t channels,
                                         double if_none) {
  std::vector<double> values(channels, if_none);
  if (tensor.has_value()) {
    dispatch_dtype(tensor->scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto* data = static_cast<const T*>(tensor->const_data_ptr());
      const int64_t stride = tensor->stride(0);
      for (int64_t c = 0; c < channels; ++c) {
        values[c] = static_cast<double>(data[c * stride]);
      }
    });
  }
  return values;
}

// The first values, one for each channel of `tensor`.
inline void store_channels(const Tensor& tensor, const std::vector<double>& values) {
  dispatch_dtype(tensor.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* data = static_cast<T*>(tensor.mutable_data_ptr());
    const int64_t channels = tensor.size(0);
    const int64_t stride = tensor.stride(0);
    for (int64_t c = 0; c < channels; ++c) {
      data[c * stride] = static_cast<T>(values[c]);
    }
  });
}

}  // namespace syncbn::cpu
