// CUDA's two 16-bit types and their conversions: to the nearest, ties to even, as on a device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __half {
  uint16_t bits;
};

struct __nv_bfloat16 {
  uint16_t bits;
};

namespace emulation {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulation

inline float __bfloat162float(__nv_bfloat16 value) {
  return emulation::bits_float(static_cast<uint32_t>(value.bits) << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = emulation::float_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    return {0x7fff};  // CUDA's one NaN
  }
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float __half2float(__half value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 31;
  const uint32_t fraction = value.bits & 1023;
  if (exponent == 0) {  // zero or subnormal
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t float_exponent = exponent == 31 ? 255 : exponent + 112;
  return emulation::bits_float(sign | (float_exponent << 23) | (fraction << 13));
}

inline __half __float2half_rn(float value) {
  const uint32_t bits = emulation::float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 16) & 0x8000;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    return {0x7fff};                     // CUDA's one NaN
  } else if (magnitude >= 0x477ff000) {  // 65,520 rounds to infinity
    result = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: a multiple of 2^-24
    result = static_cast<uint32_t>(std::nearbyint(std::fabs(value) * 0x1p24f));
  } else {
    result = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | result)};
}
