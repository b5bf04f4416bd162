// One value per channel: weights, biases, running buffers and their gradients are read and written
// as double, whatever their dtype and stride.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>

#include "dispatch.h"

namespace syncbn::cpu {

inline void load_channels(const std::optional<Tensor>& tensor, int64_t channels, double if_none,
                          double* values) {
  if (!tensor.has_value()) {
    std::fill(values, values + channels, if_none);
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
  switch (dtype) {
    case ScalarType::Half:
      return 65504;
    case ScalarType::BFloat16:
      return 3.38953139e38;
    case ScalarType::Float:
      return std::numeric_limits<float>::max();
    default:
      return std::numeric_limits<double>::max();
  }
}

inline void store_channels(const Tensor& tensor, int64_t channels, const double* values) {
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
