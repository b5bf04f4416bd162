// Values on their way between memory and the loops that compute with them.
//
// The loops know only float and double, over contiguous values. What is stored as 16 bits, or in
// runs too short for a loop of their own, is brought into a buffer first that stays in L1; float
// and double in long runs are computed with where they are.
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

// Whether values of T are computed with as they are stored.
template <typename T>
constexpr bool kStoredAsComputed = std::is_same_v<T, compute_t<T>>;

template <typename T>
struct Widen {
  static SYNCBN_INLINE void run(const T* x, int64_t n, float* out) {
    SYNCBN_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<float>(x[i]);
    }
  }
};

// Rounds to nearest, ties to even. For bfloat16 as torch does, but without a branch on NaN, which
// would keep the loop from being vectorised.
template <typename T>
struct Narrow {
  static SYNCBN_INLINE void run(const float* x, int64_t n, T* out) {
    SYNCBN_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<T, BFloat16>) {
        uint32_t bits;
        std::memcpy(&bits, &x[i], sizeof(bits));
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        out[i].x = static_cast<uint16_t>(x[i] == x[i] ? rounded : 0x7fc0);
      } else {
        out[i] = static_cast<T>(x[i]);
      }
    }
  }
};

#if defined(SYNCBN_AVX2)

// No compiler vectorises float16 by itself. The last vector overlaps the one before it.
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

template <typename T>
void widen(const T* x, int64_t n, compute_t<T>* out) {
  if constexpr (kStoredAsComputed<T>) {
    std::memcpy(out, x, n * sizeof(T));
  } else {
#if defined(SYNCBN_AVX2)
    if (std::is_same_v<T, Half> && has_avx2()) {
      return widen_f16c(reinterpret_cast<const Half*>(x), n, out);
    }
#endif
    run<Widen<T>>(x, n, out);
  }
}

template <typename T>
void narrow(const compute_t<T>* x, int64_t n, T* out) {
#if defined(SYNCBN_AVX2)
  if (std::is_same_v<T, Half> && has_avx2()) {
    return narrow_f16c(x, n, reinterpret_cast<Half*>(out));
  }
#endif
  run<Narrow<T>>(x, n, out);
}

// Rows of values, `stride` apart.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
};

// A tile of `rows` times `columns` values as it is computed with; the buffer takes it if need be.
template <typename T>
SYNCBN_INLINE Rows<const compute_t<T>> load_rows(Rows<const T> x, int64_t rows, int64_t columns,
                                                 compute_t<T>* buffer) {
  if constexpr (kStoredAsComputed<T>) {
    return x;
  } else {
    if (x.stride == columns) {
      widen(x.data, rows * columns, buffer);
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        widen(x.data + r * x.stride, columns, buffer + r * columns);
      }
    }
    return {buffer, columns};
  }
}

template <typename T>
SYNCBN_INLINE void store_rows(const compute_t<T>* buffer, Rows<T> out, int64_t rows,
                              int64_t columns) {
  if (out.stride == columns) {
    narrow(buffer, rows * columns, out.data);
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      narrow(buffer + r * columns, columns, out.data + r * out.stride);
    }
  }
}

// The next n values of a channel, n from next_chunk(); `buffer` has room for kPlanarChunk.
template <typename T>
SYNCBN_INLINE const compute_t<T>* load_runs(const T* x, Runs& runs, int64_t n,
                                            compute_t<T>* buffer) {
  if constexpr (kStoredAsComputed<T>) {
    if (n <= runs.length()) {
      x += runs.offset;
      runs.advance(n);
      return x;
    }
  }
  for (int64_t i = 0; i < n;) {
    const int64_t length = std::min(runs.length(), n - i);
    widen(x + runs.offset, length, buffer + i);
    runs.advance(length);
    i += length;
  }
  return buffer;
}

}  // namespace syncbn::cpu
