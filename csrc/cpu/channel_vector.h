// One value per channel: weights, biases, running buffers and their gradients are read and written
// as double, whatever their dtype and stride.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>

#include "../common/dispatch.h"

namespace syncbn::cpu {

inline void read_channels(const std::optional<Tensor>& tensor, int64_t channels, double otherwise,
                          double* values) {
  if (!tensor.has_value()) {
    std::fill(values, values + channels, otherwise);
    return;
  }
  dispatch_float(tensor->scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* data = static_cast<const T*>(tensor->const_data_ptr());
    const int64_t stride = tensor->stride(0);
    for (int64_t c = 0; c < channels; ++c) {
      values[c] = static_cast<double>(data[c * stride]);
    }
  });
}

inline double largest_finite(ScalarType dtype) {
  return dtype == ScalarType::Half     ? 65504
         : dtype == ScalarType::Double ? std::numeric_limits<double>::max()
                                       : std::numeric_limits<float>::max();
}

inline void write_channels(const Tensor& tensor, int64_t channels, const double* values) {
  dispatch_float(tensor.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* data = static_cast<T*>(tensor.mutable_data_ptr());
    const int64_t stride = tensor.stride(0);
    for (int64_t c = 0; c < channels; ++c) {
      data[c * stride] = static_cast<T>(values[c]);
    }
  });
}

}  // namespace syncbn::cpu
