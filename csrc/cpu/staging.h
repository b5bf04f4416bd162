// Values on their way between memory and the loops that compute with them.
//
// Loops read float, double and bfloat16 where they are, provided that they lie in long runs. Runs
// too short for a loop of their own, and float16 on x86-64, whose conversions no compiler
// vectorises, are brought into a buffer first that stays in L1.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../common/stable.h"
#include "partition.h"
#include "simd.h"

#if defined(SYNCBN_AVX2)
#include <immintrin.h>
#endif

namespace syncbn::cpu {

// What loops see of stored values of T.
#if defined(SYNCBN_AVX2)
template <typename T>
using staged_t = std::conditional_t<std::is_same_v<T, Half>, float, T>;
#else
template <typename T>
using staged_t = T;
#endif

template <typename T>
constexpr bool kStaged = !std::is_same_v<T, staged_t<T>>;

template <typename T>
SYNCBN_INLINE compute_t<T> to_compute(T x) {
  return static_cast<compute_t<T>>(x);
}

// Rounds to nearest, ties to even. For bfloat16 as torch does, but without a branch on NaN, which
// would keep loops from being vectorised.
template <typename T>
SYNCBN_INLINE T from_compute(compute_t<T> x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    T result;
    result.x = static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
    return result;
  } else {
    return static_cast<T>(x);
  }
}

#if defined(SYNCBN_AVX2)

// The last vector overlaps the one before it.
SYNCBN_AVX2 inline void widen_f16c(const Half* x, int64_t n, float* out) {
  const auto widen8 = [&](int64_t i) __attribute__((target("avx2,fma,f16c"))) {
    const auto* from = reinterpret_cast<const __m128i*>(x + i);
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(from)));
  };
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    widen8(i);
  }
  if (n % 8 != 0 && n > 8) {
    return widen8(n - 8);
  }
  for (int64_t i = n & ~int64_t{7}; i < n; ++i) {
    out[i] = _cvtsh_ss(x[i].x);
  }
}

SYNCBN_AVX2 inline void narrow_f16c(const float* x, int64_t n, Half* out) {
  const auto narrow8 = [&](int64_t i) __attribute__((target("avx2,fma,f16c"))) {
    auto* to = reinterpret_cast<__m128i*>(out + i);
    _mm_storeu_si128(to, _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  };
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    narrow8(i);
  }
  if (n % 8 != 0 && n > 8) {
    return narrow8(n - 8);
  }
  for (int64_t i = n & ~int64_t{7}; i < n; ++i) {
    out[i].x = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT);
  }
}

#endif

// n values as they are staged.
template <typename T>
void load_values(const T* x, int64_t n, staged_t<T>* out) {
  if constexpr (kStaged<T>) {
#if defined(SYNCBN_AVX2)
    if (has_avx2()) {
      return widen_f16c(x, n, out);
    }
#endif
    for (int64_t i = 0; i < n; ++i) {
      out[i] = to_compute(x[i]);
    }
  } else {
    std::memcpy(out, x, n * sizeof(T));
  }
}

template <typename T>
void store_values(const staged_t<T>* x, int64_t n, T* out) {
#if defined(SYNCBN_AVX2)
  if (has_avx2()) {
    return narrow_f16c(x, n, out);
  }
#endif
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_compute<T>(x[i]);
  }
}

// Rows of values, `stride` apart.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
};

// Asks for what lies 4 KB after some rows, to be called while they are read. The statistics, which
// read a single stream, get half of the bandwidth of memory where they leave it to the hardware.
// It does not matter to a prefetch that a tensor ends.
template <typename T>
SYNCBN_INLINE void prefetch_ahead(Rows<const T> x, int64_t rows, int64_t columns) {
#if defined(__GNUC__)
  const auto* bytes = reinterpret_cast<const char*>(x.data) + 4096;
  for (int64_t r = 0; r < rows; ++r, bytes += x.stride * sizeof(T)) {
    for (size_t i = 0; i < columns * sizeof(T); i += 64) {
      __builtin_prefetch(bytes + i);
    }
  }
#endif
}

// A tile of `rows` times `columns` values as loops see it; the buffer takes it if need be.
template <typename T>
SYNCBN_INLINE Rows<const staged_t<T>> load_rows(Rows<const T> x, int64_t rows, int64_t columns,
                                                staged_t<T>* buffer) {
  if constexpr (!kStaged<T>) {
    return x;
  } else {
    if (x.stride == columns) {
      load_values(x.data, rows * columns, buffer);
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        load_values(x.data + r * x.stride, columns, buffer + r * columns);
      }
    }
    return {buffer, columns};
  }
}

template <typename T>
SYNCBN_INLINE void store_rows(const staged_t<T>* buffer, Rows<T> out, int64_t rows,
                              int64_t columns) {
  if (out.stride == columns) {
    store_values(buffer, rows * columns, out.data);
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      store_values(buffer + r * columns, columns, out.data + r * out.stride);
    }
  }
}

// The next n values of a channel, n from next_chunk(); `buffer` has room for kPlanarChunk.
template <typename T>
SYNCBN_INLINE const staged_t<T>* load_runs(const T* x, Runs& runs, int64_t n, staged_t<T>* buffer) {
  if constexpr (!kStaged<T>) {
    if (n <= runs.length()) {
      x += runs.offset;
      runs.advance(n);
      return x;
    }
  }
  for (int64_t i = 0; i < n;) {
    const int64_t length = std::min(runs.length(), n - i);
    load_values(x + runs.offset, length, buffer + i);
    runs.advance(length);
    i += length;
  }
  return buffer;
}

}  // namespace syncbn::cpu
