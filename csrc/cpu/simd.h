// One binary for every x86-64: a kernel is compiled for the baseline and for AVX2, and the first
// call picks. Elsewhere (aarch64) the baseline is what the compiler vectorises for.
//
// A kernel is a struct with a static, always-inlined run(); being inlined, it takes the
// instruction set of the function it lands in.
#pragma once

#if defined(__GNUC__)
#define SYNCBN_INLINE __attribute__((always_inline)) inline
#else
#define SYNCBN_INLINE inline
#endif

// Before a loop: its iterations do not depend on one another.
#if defined(__GNUC__) && !defined(__clang__)
#define SYNCBN_INDEPENDENT _Pragma("GCC ivdep")
#else
#define SYNCBN_INDEPENDENT
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define SYNCBN_AVX2 __attribute__((target("avx2,fma,f16c"), noinline))
#endif

namespace syncbn::cpu {

#if defined(SYNCBN_AVX2)

inline bool has_avx2() {
  // Every processor with AVX2 has F16C, which not every compiler can ask for.
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return supported;
}

template <typename Kernel, typename... Args>
SYNCBN_AVX2 void run_avx2(Args... args) {
  Kernel::run(args...);
}

template <typename Kernel, typename... Args>
void run(Args... args) {
  if (has_avx2()) {
    run_avx2<Kernel>(args...);
  } else {
    Kernel::run(args...);
  }
}

#else

template <typename Kernel, typename... Args>
void run(Args... args) {
  Kernel::run(args...);
}

#endif

// The type that values of T are computed in. Sums in it stay within one cache-sized chunk; what
// crosses chunks is double.
template <typename T>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};
template <typename T>
using compute_t = typename ComputeType<T>::type;

// Independent accumulators of a sum over contiguous values: four AVX2 vectors.
template <typename A>
constexpr int kLanes = 128 / sizeof(A);

// Adds up kCount accumulators, a power of two; the sum is in the first.
template <int kCount, typename A>
SYNCBN_INLINE void fold(A* sums) {
  constexpr int kHalf = kCount / 2;
  for (int i = 0; i < kHalf; ++i) {
    sums[i] += sums[i + kHalf];
  }
  if constexpr (kHalf > 1) {
    fold<kHalf>(sums);
  }
}

}  // namespace syncbn::cpu
