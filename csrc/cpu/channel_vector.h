// Channel vectors (weights, biases, running statistics, gradients), which have any dtype and stride
// and are read and written as double.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "dispatch.h"

namespace syncbn::cpu {

// Up to `capacity` arrays of one double per channel. They share one allocation: an allocation for
// each would take several percent of a small layer's pass.
class ChannelArrays {
 public:
  ChannelArrays(int64_t capacity, int64_t channels)
      : channels_(channels), values_(capacity * channels), next_(values_.data()) {}

  double* add() {
    double* const array = next_;
    next_ += channels_;
    return array;
  }

  double* load(const std::optional<Tensor>& tensor, double if_none) {
    double* const array = add();
    if (!tensor.has_value()) {
      std::fill(array, next_, if_none);
      return array;
    }
    dispatch_dtype(tensor->scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto* data = static_cast<const T*>(tensor->const_data_ptr());
      const int64_t stride = tensor->stride(0);
      for (int64_t c = 0; c < channels_; ++c) {
        array[c] = static_cast<double>(data[c * stride]);
      }
    });
    return array;
  }

 private:
  int64_t channels_;
  std::vector<double> values_;
  double* next_;
};

inline void store_channels(const Tensor& tensor, const double* values) {
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
