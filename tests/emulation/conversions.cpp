// The conversions of 16-bit types over arrays, for ctypes.

#include "float16.h"

extern "C" {

void half_to_float(const __half* input, float* output, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    output[i] = __half2float(input[i]);
  }
}

void float_to_half(const float* input, __half* output, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    output[i] = __float2half_rn(input[i]);
  }
}

void bfloat16_to_float(const __nv_bfloat16* input, float* output, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    output[i] = __bfloat162float(input[i]);
  }
}

void float_to_bfloat16(const float* input, __nv_bfloat16* output, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    output[i] = __float2bfloat16_rn(input[i]);
  }
}

}  // extern "C"
