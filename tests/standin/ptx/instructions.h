// PTX instructions on registers, for translated kernels (translate_ptx.py).
#pragma once

#include <algorithm>
#include <cfenv>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "threads/float16.h"
#include "threads/grid.h"

namespace emulation::ptx {

// A register holds bits. An instruction reads the lowest ones as its type. A register that was not
// written is NaN of each type.
union Register16 {
  uint16_t u16 = -1;
  int16_t s16;
  uint8_t u8;
  int8_t s8;
};

union Register32 {
  uint32_t u32 = -1;
  int32_t s32;
  float f32;
  uint16_t u16;
  int16_t s16;
  uint8_t u8;
  int8_t s8;
};

union Register64 {
  uint64_t u64 = -1;
  int64_t s64;
  double f64;
  uint32_t u32;
  int32_t s32;
  uint16_t u16;
  int16_t s16;
  uint8_t u8;
  int8_t s8;
};

template <typename T>
inline void check_divisor(T divisor) {
  if (divisor == 0) {
    Block::current->fail_thread("divides an integer by zero");
  }
}

template <typename T>
inline T quotient(T a, T b) {
  check_divisor(b);
  return std::is_signed_v<T> && b == T(-1) ? T(0 - a) : T(a / b);  // the smallest number overflows
}

template <typename T>
inline T remainder(T a, T b) {
  check_divisor(b);
  return std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
}

// The number if the other operand is NaN; -0 is less than 0.
template <typename T>
inline T minimum(T a, T b) {
  return a == b ? (std::signbit(a) ? a : b) : std::fmin(a, b);
}

template <typename T>
inline T maximum(T a, T b) {
  return a == b ? (std::signbit(a) ? b : a) : std::fmax(a, b);
}

// A distance beyond the width shifts all bits out.
template <typename T>
inline T shift_left(T a, uint32_t distance) {
  return distance >= 8 * sizeof(T) ? T(0) : T(a << distance);
}

template <typename T>
inline T shift_right(T a, uint32_t distance) {
  const uint32_t most = 8 * sizeof(T) - 1;
  return distance > most ? T(T(a >> most) >> 1) : T(a >> distance);
}

// `length` bits from `start` on; bits past the last are zero.
inline uint32_t extract_bits(uint32_t a, uint32_t start, uint32_t length) {
  start &= 255;
  length &= 255;
  return shift_right(a, start) & ~shift_left(~0u, length);
}

// Clamped to 0 and 1; NaN becomes 0.
inline float saturate(float a) { return a > 0 ? (a < 1 ? a : 1) : 0; }

// A subnormal number becomes a zero with its sign.
inline float flush(float a) { return std::abs(a) < FLT_MIN ? std::copysign(0.f, a) : a; }

// Rounded to the nearest; hardware's approximation may differ.
inline float approximate_quotient(float a, float b) {
  const bool is_flushed = std::abs(b) > 0x1p126f && std::isfinite(b);
  return is_flushed ? a * std::copysign(0.f, b) : a / b;
}

// Volatile, so that no operation moves past the changes of the rounding mode.
inline float fma_downward(float a, float b, float c) {
  volatile float inputs[] = {a, b, c};
  std::fesetround(FE_DOWNWARD);
  volatile float result = std::fma(inputs[0], inputs[1], inputs[2]);
  std::fesetround(FE_TONEAREST);
  return result;
}

inline float half_to_float(uint16_t bits) { return __half2float({bits}); }
inline float bfloat16_to_float(uint16_t bits) { return __bfloat162float({bits}); }
inline uint16_t float_to_half(float value) { return __float2half_rn(value).bits; }
inline uint16_t float_to_bfloat16(float value) { return __float2bfloat16_rn(value).bits; }

// The value of another lane, or the own value if that lane is outside of the section, which bits 8
// to 12 of `clamp` define as in PTX.
struct Shuffled {
  uint32_t bits;
  bool valid;
};

template <typename Source>
inline Shuffled shuffle(Wait wait, uint32_t bits, uint32_t clamp, uint32_t mask,
                        const Source& source) {
  const uint64_t* values = Block::current->exchange(wait, mask, bits, sizeof(bits));
  const uint32_t section = clamp >> 8 & 31;
  const uint32_t own = lane();
  const uint32_t last = (own & section) | (clamp & 31 & ~section);
  const uint32_t from = source(own, section);
  const bool valid = from <= last;
  return {static_cast<uint32_t>(values[valid ? from : own]), valid};
}

inline Shuffled shuffle_down(uint32_t bits, uint32_t delta, uint32_t clamp, uint32_t mask) {
  return shuffle(Wait::kShflDown, bits, clamp, mask,
                 [=](uint32_t own, uint32_t) { return own + (delta & 31); });
}

inline Shuffled shuffle_bfly(uint32_t bits, uint32_t lanes, uint32_t clamp, uint32_t mask) {
  return shuffle(Wait::kShflXor, bits, clamp, mask,
                 [=](uint32_t own, uint32_t) { return own ^ (lanes & 31); });
}

inline Shuffled shuffle_idx(uint32_t bits, uint32_t source, uint32_t clamp, uint32_t mask) {
  return shuffle(Wait::kShfl, bits, clamp, mask, [=](uint32_t own, uint32_t section) {
    return (own & section) | (source & 31 & ~section);
  });
}

inline void barrier() { Block::current->suspend(Wait::kSyncthreads); }
inline void fence() { Block::current->fence(); }

}  // namespace emulation::ptx
