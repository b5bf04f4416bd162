// Weights, biases and running statistics, whose dtype and stride are known at run time only: they
// are touched once for each channel and block.
#pragma once

#include "device.h"
#include "operators.h"

namespace syncbn::cuda {

__device__ inline double load_channel(const ChannelVector& vector, int64_t channel,
                                      double if_none) {
  if (vector.data == nullptr) {
    return if_none;
  }
  const int64_t i = channel * vector.stride;
  switch (vector.dtype) {
    case DType::kHalf:
      return __half2float(static_cast<const __half*>(vector.data)[i]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(vector.data)[i]);
    case DType::kFloat:
      return static_cast<const float*>(vector.data)[i];
    default:
      return static_cast<const double*>(vector.data)[i];
  }
}

// Rounds to float first for the 16-bit types.
__device__ inline void store_channel(const ChannelVector& vector, int64_t channel, double value) {
  const int64_t i = channel * vector.stride;
  switch (vector.dtype) {
    case DType::kHalf:
      static_cast<__half*>(vector.data)[i] = __float2half_rn(static_cast<float>(value));
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(vector.data)[i] = __float2bfloat16_rn(static_cast<float>(value));
      break;
    case DType::kFloat:
      static_cast<float*>(vector.data)[i] = static_cast<float>(value);
      break;
    default:
      static_cast<double*>(vector.data)[i] = value;
  }
}

}  // namespace syncbn::cuda
