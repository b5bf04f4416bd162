// A pack: two vectors of values, and the conversions between a pack and stored values.
//
// A value has a lane in the pack and a position in memory. The lanes of a pack of bfloat16 are not
// in the order of positions: the first vector has the values at even positions, the second the
// values at odd positions. Both are made of 32-bit words, each of two neighboring values, by a
// shift and a mask: half as many instructions as the order of positions would take.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../common/dtype.h"
#include "../common/stable.h"
#include "cache.h"
#include "sigmoid.h"
#include "simd.h"

namespace syncbn::cpu {

template <typename Isa>
struct Words {
  typedef uint32_t Vector __attribute__((vector_size(Isa::kVectorBytes)));
  typedef uint32_t HalfVector __attribute__((vector_size(Isa::kVectorBytes / 2)));
};

template <typename A, typename Isa>
struct Pack {
  typedef A Vector __attribute__((vector_size(Isa::kVectorBytes)));
  static constexpr int kSize = 2 * Isa::kVectorBytes / sizeof(A);

  Vector low;
  Vector high;

  static SYNCBN_INLINE Pack zero() { return {Vector{}, Vector{}}; }
  static SYNCBN_INLINE Pack broadcast(A x) {
    // A variable, because GCC would set an unnamed vector lane by lane.
    const Vector vector = x - Vector{};
    return {vector, vector};
  }
  // Reads values in the order of lanes.
  static SYNCBN_INLINE Pack read(const A* from) {
    Pack pack;
    std::memcpy(&pack.low, from, sizeof(Vector));
    std::memcpy(&pack.high, from + kSize / 2, sizeof(Vector));
    return pack;
  }
  SYNCBN_INLINE void write(A* to) const {
    std::memcpy(to, &low, sizeof(Vector));
    std::memcpy(to + kSize / 2, &high, sizeof(Vector));
  }

  friend SYNCBN_INLINE Pack operator+(const Pack& x, const Pack& y) {
    return {x.low + y.low, x.high + y.high};
  }
  friend SYNCBN_INLINE Pack operator-(const Pack& x, const Pack& y) {
    return {x.low - y.low, x.high - y.high};
  }
  friend SYNCBN_INLINE Pack operator*(const Pack& x, const Pack& y) {
    return {x.low * y.low, x.high * y.high};
  }
  friend SYNCBN_INLINE Pack operator*(const Pack& x, A y) { return {x.low * y, x.high * y}; }

  // Overloads of common/activations.h. A compiler fuses the two operations of one expression in
  // each function or, if the processor has no such instruction, in none.
  friend SYNCBN_INLINE Pack multiply_add(const Pack& x, const Pack& y, const Pack& z) {
    return {x.low * y.low + z.low, x.high * y.high + z.high};
  }
  friend SYNCBN_INLINE Pack where_greater(const Pack& x, A bound, const Pack& if_true,
                                          const Pack& if_false) {
    return {x.low > bound ? if_true.low : if_false.low,
            x.high > bound ? if_true.high : if_false.high};
  }
  friend SYNCBN_INLINE Pack zero_where_at_most(const Pack& x, A bound, const Pack& otherwise) {
    return {x.low <= bound ? Vector{} : otherwise.low, x.high <= bound ? Vector{} : otherwise.high};
  }
  friend SYNCBN_INLINE Pack sigmoid(const Pack& z) {
    Pack result;
    detail::sigmoid<A>(z.low, result.low);
    detail::sigmoid<A>(z.high, result.high);
    return result;
  }
};

// The position in memory of a lane's value in a pack of T.
template <typename T, typename Isa>
constexpr int position_of_lane(int lane) {
  constexpr int kHalf = Pack<compute_t<T>, Isa>::kSize / 2;
  return !std::is_same_v<T, BFloat16> ? lane : lane < kHalf ? 2 * lane : 2 * (lane - kHalf) + 1;
}

// The distance at which loops prefetch, measured with AVX2. It may be past a tensor's end.
constexpr int64_t kPrefetchBytes = 2048;

// The lines of a pack that are prefetched, measured: if packs are not read in the order of memory,
// processors do not complete a pair of lines by themselves.
enum class Ahead { kFirstLine, kAllLines };

template <typename P, Ahead kAhead, bool kToWrite = false, typename T>
SYNCBN_INLINE void prefetch_pack(const T* from) {
  constexpr int64_t kStep = kAhead == Ahead::kAllLines ? kLine / sizeof(T) : P::kSize;
  for (int64_t i = 0; i < P::kSize; i += kStep) {
    __builtin_prefetch(from + i, kToWrite);
  }
}

namespace detail {

// Rounds to the upper half of each word, to nearest, ties to even. A NaN stays a NaN: the lower
// half of a computed or loaded NaN and of to_constant() is zero.
template <typename Isa, typename Vector>
SYNCBN_INLINE void round_to_bfloat16(const Vector& x, typename Words<Isa>::Vector& rounded) {
  const auto bits = (typename Words<Isa>::Vector)x;
  rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
}

// GCC has no vector type for float16 on x86 and cannot inline the intrinsics into a function that
// is also compiled for the baseline. Clang rejects the assembly in such a function.
#if defined(__x86_64__) && !defined(__clang__)
template <typename Isa>
constexpr bool kConvertsHalf = !std::is_same_v<Isa, Baseline>;

template <typename Vector, typename HalfVector>
SYNCBN_INLINE void widen_half(const HalfVector& x, Vector& wide) {
  asm("vcvtph2ps %1, %0" : "=v"(wide) : "vm"(x));
}
template <typename Vector, typename HalfVector>
SYNCBN_INLINE void narrow_to_half(const Vector& x, HalfVector& narrow) {
  asm("vcvtps2ph $0, %1, %0" : "=v"(narrow) : "v"(x));  // 0: to nearest, ties to even
}
#else
template <typename Isa>
constexpr bool kConvertsHalf = false;

// Declared for discarded calls.
template <typename Vector, typename HalfVector>
void widen_half(const HalfVector& x, Vector& wide);
template <typename Vector, typename HalfVector>
void narrow_to_half(const Vector& x, HalfVector& narrow);
#endif

// Stores and bypasses the caches; `to` is aligned to the vector. Sanitizers do not see stores by
// assembly.
template <typename Vector>
SYNCBN_INLINE void stream_vector(const Vector& x, void* to) {
#if defined(__clang__)
  __builtin_nontemporal_store(x, static_cast<Vector*>(to));
#elif defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  if constexpr (sizeof(Vector) > 16) {
    asm("vmovntps %1, %0" : "=m"(*static_cast<Vector*>(to)) : "v"(x));
  } else {
    asm("movntps %1, %0" : "=m"(*static_cast<Vector*>(to)) : "x"(x));
  }
#else
  std::memcpy(to, &x, sizeof(x));
#endif
}

template <bool kStream, typename Vector>
SYNCBN_INLINE void store_vector(const Vector& x, void* to) {
  if constexpr (kStream) {
    stream_vector(x, to);
  } else {
    std::memcpy(to, &x, sizeof(x));
  }
}

}  // namespace detail

template <typename T>
SYNCBN_INLINE compute_t<T> to_compute(T x) {
  return static_cast<compute_t<T>>(x);
}

// A constant of a formula. A NaN has a lower half of zero: see round_to_bfloat16().
template <typename A>
SYNCBN_INLINE A to_constant(double x) {
  return x == x ? static_cast<A>(x) : std::numeric_limits<A>::quiet_NaN();
}

// Loads the pack at `from`.
template <typename T, typename Isa>
SYNCBN_INLINE Pack<compute_t<T>, Isa> load(const T* from) {
  using P = Pack<compute_t<T>, Isa>;
  if constexpr (std::is_same_v<T, BFloat16>) {
    typename Words<Isa>::Vector pairs;
    std::memcpy(&pairs, from, sizeof(pairs));
    return {(typename P::Vector)(pairs << 16), (typename P::Vector)(pairs & 0xffff0000u)};
  } else if constexpr (std::is_same_v<T, compute_t<T>>) {
    return P::read(from);
  } else if constexpr (detail::kConvertsHalf<Isa>) {
    typename Words<Isa>::HalfVector halves[2];
    std::memcpy(&halves[0], from, sizeof(halves[0]));
    std::memcpy(&halves[1], from + P::kSize / 2, sizeof(halves[1]));
    P pack;
    detail::widen_half(halves[0], pack.low);
    detail::widen_half(halves[1], pack.high);
    return pack;
  } else {
    float values[P::kSize];
    for (int i = 0; i < P::kSize; ++i) {
      values[i] = to_compute(from[i]);
    }
    return P::read(values);
  }
}

// Stores a pack. With kStream `to` must be aligned to a vector of T.
template <typename T, typename Isa, bool kStream = false>
SYNCBN_INLINE void store(const Pack<compute_t<T>, Isa>& pack, T* to) {
  using P = Pack<compute_t<T>, Isa>;
  if constexpr (std::is_same_v<T, BFloat16>) {
    typename Words<Isa>::Vector even, odd;
    detail::round_to_bfloat16<Isa>(pack.low, even);
    detail::round_to_bfloat16<Isa>(pack.high, odd);
    detail::store_vector<kStream>((even >> 16) | (odd & 0xffff0000u), to);
  } else if constexpr (std::is_same_v<T, compute_t<T>>) {
    detail::store_vector<kStream>(pack.low, to);
    detail::store_vector<kStream>(pack.high, to + P::kSize / 2);
  } else if constexpr (detail::kConvertsHalf<Isa>) {
    typename Words<Isa>::HalfVector halves[2];
    detail::narrow_to_half(pack.low, halves[0]);
    detail::narrow_to_half(pack.high, halves[1]);
    detail::store_vector<kStream>(halves[0], to);
    detail::store_vector<kStream>(halves[1], to + P::kSize / 2);
  } else {
    float values[P::kSize];
    pack.write(values);
    for (int i = 0; i < P::kSize; ++i) {
      to[i] = static_cast<T>(values[i]);
    }
  }
}

// Load and store the `count` values before `end`, the last positions of a pack. The other positions
// of a loaded pack are zero.
template <typename T, typename Isa>
SYNCBN_INLINE Pack<compute_t<T>, Isa> load_last(const T* end, int64_t count) {
  constexpr int kSize = Pack<compute_t<T>, Isa>::kSize;
  T values[kSize] = {};
  std::memcpy(values + kSize - count, end - count, count * sizeof(T));
  return load<T, Isa>(values);
}
template <typename T, typename Isa>
SYNCBN_INLINE void store_last(const Pack<compute_t<T>, Isa>& pack, T* end, int64_t count) {
  constexpr int kSize = Pack<compute_t<T>, Isa>::kSize;
  T values[kSize];
  store<T, Isa>(pack, values);
  std::memcpy(end - count, values + kSize - count, count * sizeof(T));
}

namespace detail {

template <typename T, typename Isa>
struct Positions {
  compute_t<T> of_lane[Pack<compute_t<T>, Isa>::kSize];

  constexpr Positions() : of_lane() {
    for (int lane = 0; lane < Pack<compute_t<T>, Isa>::kSize; ++lane) {
      of_lane[lane] = position_of_lane<T, Isa>(lane);
    }
  }
};

}  // namespace detail

// Returns the first `count` positions of `first` and the other positions of `others`.
template <typename T, typename Isa>
SYNCBN_INLINE Pack<compute_t<T>, Isa> first_positions(const Pack<compute_t<T>, Isa>& first,
                                                      const Pack<compute_t<T>, Isa>& others,
                                                      int64_t count) {
  using P = Pack<compute_t<T>, Isa>;
  static constexpr detail::Positions<T, Isa> kPositions;
  const P positions = P::read(kPositions.of_lane);
  const auto bound = static_cast<compute_t<T>>(count);
  return {positions.low < bound ? first.low : others.low,
          positions.high < bound ? first.high : others.high};
}

// Returns the last `count` positions of `pack`, and zero in the other positions.
template <typename T, typename Isa>
SYNCBN_INLINE Pack<compute_t<T>, Isa> keep_last(const Pack<compute_t<T>, Isa>& pack,
                                                int64_t count) {
  using P = Pack<compute_t<T>, Isa>;
  return first_positions<T, Isa>(P::zero(), pack, P::kSize - count);
}

}  // namespace syncbn::cpu
