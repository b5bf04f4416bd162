// A pack: two vectors of values to compute with, and how stored values become one and back.
//
// A pack holds a value in a lane, memory has it in a place. The lanes of a pack of bfloat16 are not
// in the order of places: two neighbors are one 32-bit word, whose halves are shifted and masked
// into the two vectors: first the values at even places, then those at odd ones. That takes half of
// the instructions that keeping the order would.
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
    // Named, because GCC sets a vector that is made within a struct lane by lane.
    const Vector vector = x - Vector{};
    return {vector, vector};
  }
  // Values in the order of lanes, whatever is stored in that order.
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

  // Those of common/activations.h. A compiler fuses the two operations of one expression in every
  // function, or, without the instruction, in none.
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

// The place in memory of what lane `lane` of a pack of T holds.
template <typename T, typename Isa>
constexpr int place_of_lane(int lane) {
  constexpr int kHalf = Pack<compute_t<T>, Isa>::kSize / 2;
  return !std::is_same_v<T, BFloat16> ? lane : lane < kHalf ? 2 * lane : 2 * (lane - kHalf) + 1;
}

// The distance at which loops read ahead, measured with AVX2. It does not matter that a tensor ends
// before.
constexpr int64_t kPrefetchBytes = 2048;

// The lines of a pack that are read ahead, measured: where packs are not read in the order of
// memory, processors do not complete a pair of lines by themselves.
enum class Ahead { kFirstLine, kAllLines };

template <typename P, Ahead kAhead, bool kToWrite = false, typename T>
SYNCBN_INLINE void prefetch_pack(const T* from) {
  constexpr int64_t kStep = kAhead == Ahead::kAllLines ? kLine / sizeof(T) : P::kSize;
  for (int64_t i = 0; i < P::kSize; i += kStep) {
    __builtin_prefetch(from + i, kToWrite);
  }
}

namespace detail {

// Rounds to the upper half of each word, to nearest, ties to even. A NaN stays one: its lower half
// is zero, whether it was computed, loaded or a constant from to_constant().
template <typename Isa, typename Vector>
SYNCBN_INLINE void round_to_bfloat16(const Vector& x, typename Words<Isa>::Vector& rounded) {
  const auto bits = (typename Words<Isa>::Vector)x;
  rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
}

// GCC has no vector type for float16 on x86, and its intrinsics cannot be inlined into a function
// that is compiled for the baseline as well. Clang does not take the assembly in such a function.
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

// Declared for the calls that are left out.
template <typename Vector, typename HalfVector>
void widen_half(const HalfVector& x, Vector& wide);
template <typename Vector, typename HalfVector>
void narrow_to_half(const Vector& x, HalfVector& narrow);
#endif

// Stores past the caches; `to` is aligned to the vector. A sanitizer does not see what assembly
// stores.
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

// A value to compute outputs with.
template <typename A>
SYNCBN_INLINE A to_constant(double x) {
  return x == x ? static_cast<A>(x) : std::numeric_limits<A>::quiet_NaN();
}

// The values from `from` on.
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

// The inverse. Streaming needs `to` to be aligned to a vector of T.
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

// The `count` values before `end`, in the last places; the others are zero. And the inverse.
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
struct Places {
  compute_t<T> of_lane[Pack<compute_t<T>, Isa>::kSize];

  constexpr Places() : of_lane() {
    for (int lane = 0; lane < Pack<compute_t<T>, Isa>::kSize; ++lane) {
      of_lane[lane] = place_of_lane<T, Isa>(lane);
    }
  }
};

}  // namespace detail

// The first `count` places of one pack, the others of another.
template <typename T, typename Isa>
SYNCBN_INLINE Pack<compute_t<T>, Isa> first_places(const Pack<compute_t<T>, Isa>& first,
                                                   const Pack<compute_t<T>, Isa>& others,
                                                   int64_t count) {
  using P = Pack<compute_t<T>, Isa>;
  static constexpr detail::Places<T, Isa> kPlaces;
  const P places = P::read(kPlaces.of_lane);
  const auto bound = static_cast<compute_t<T>>(count);
  return {places.low < bound ? first.low : others.low,
          places.high < bound ? first.high : others.high};
}

// The last `count` places of `pack`, zero in the others.
template <typename T, typename Isa>
SYNCBN_INLINE Pack<compute_t<T>, Isa> keep_last(const Pack<compute_t<T>, Isa>& pack,
                                                int64_t count) {
  using P = Pack<compute_t<T>, Isa>;
  return first_places<T, Isa>(P::zero(), pack, P::kSize - count);
}

}  // namespace syncbn::cpu
