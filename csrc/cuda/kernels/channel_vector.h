// Access to weights, biases and running statistics. Their dtypes and strides are run-time values,
// because each block accesses a channel only once.
#pragma once

#include <cstring>

#include "device.h"
#include "launchers.h"

namespace syncbn::cuda {

// Loads the bits of a value; a thread waits for them in decode().
__device__ inline uint64_t load_bits(const ChannelVector& vector, int64_t channel) {
  if (vector.data == nullptr) {
    return 0;
  }
  const int64_t i = channel * vector.stride;
  switch (vector.dtype) {
    case DType::kHalf:
    case DType::kBFloat16:
      return static_cast<const uint16_t*>(vector.data)[i];
    case DType::kFloat:
      return static_cast<const uint32_t*>(vector.data)[i];
    default:
      return static_cast<const uint64_t*>(vector.data)[i];
  }
}

template <typename T, typename Bits>
__device__ inline T from_bits(Bits bits) {
  static_assert(sizeof(T) == sizeof(Bits));
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

__device__ inline double decode(const ChannelVector& vector, uint64_t bits, double if_none) {
  if (vector.data == nullptr) {
    return if_none;
  }
  switch (vector.dtype) {
    case DType::kHalf:
      return __half2float(from_bits<__half>(static_cast<uint16_t>(bits)));
    case DType::kBFloat16:
      return __bfloat162float(from_bits<__nv_bfloat16>(static_cast<uint16_t>(bits)));
    case DType::kFloat:
      return from_bits<float>(static_cast<uint32_t>(bits));
    default:
      return from_bits<double>(bits);
  }
}

// Values of the 16-bit types are rounded to float first.
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
