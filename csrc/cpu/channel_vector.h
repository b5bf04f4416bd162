// One value per channel: weights, biases, running buffers and their gradients are read and written
// as double, whatever their dtype and stride.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "dispatch.h"

namespace syncbn::cpu {

// So many arrays of a value for each channel, in one allocation.
class ChannelArrays {
 public:
  ChannelArrays(int64_t channels, int number)
      : channels_(channels), storage_(channels * number), next_(storage_.data()) {}

  // An array that was not taken yet, of zeros.
  double* take() {
    double* const array = next_;
    next_ += channels_;
    return array;
  }
  // An array of a vector's values.
  double* load(const std::optional<Tensor>& tensor, double if_none) {
    double* const values = take();
    if (!tensor.has_value()) {
      std::fill(values, values + channels_, if_none);
      return values;
    }
    dispatch_dtype(tensor->scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto* data = static_cast<const T*>(tensor->const_data_ptr());
      const int64_t stride = tensor->stride(0);
      for (int64_t c = 0; c < channels_; ++c) {
        values[c] = static_cast<double>(data[c * stride]);
      }
    });
    return values;
  }

 private:
  int64_t channels_;
  std::vector<double> storage_;
  double* next_;
};

// The first values, one for each channel of `tensor`.
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
