// One binary for every x86-64 processor: a kernel is compiled for the baseline, AVX2 and AVX-512,
// and the first call chooses. Other processors (aarch64) run the baseline.
//
// A kernel is a struct with a static, always-inlined run<Isa>(), which is compiled for the
// instruction set of its caller. dispatch_isa<Kernel>(arguments) calls it.
#pragma once

#include <cstdlib>
#include <cstring>

#include "../common/host_device.h"

#if !defined(__GNUC__)
#error "syncbn is written in the vector types of GCC and Clang"
#endif

// Marks a loop whose iterations are independent.
#if defined(__clang__)
#define SYNCBN_INDEPENDENT
#else
#define SYNCBN_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace syncbn::cpu {

// Instruction sets, by the width of their vectors.
struct Baseline {
  static constexpr int kVectorBytes = 16;
};
struct Avx2 {
  static constexpr int kVectorBytes = 32;
};
struct Avx512 {
  static constexpr int kVectorBytes = 64;
};

#if defined(__x86_64__)

enum class SimdLevel { kBaseline, kAvx2, kAvx512 };

// The processor's level, or the lower one that torch's own variable names ("default" or "avx2").
inline SimdLevel find_simd_level() {
  const char* asked = std::getenv("ATEN_CPU_CAPABILITY");
  const auto asks = [&](const char* name) { return asked && std::strcmp(asked, name) == 0; };
  // Every processor with AVX2 has F16C; not every compiler can test for it.
  if (asks("default") || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    return SimdLevel::kBaseline;
  }
  if (asks("avx2") || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return SimdLevel::kAvx2;
  }
  return SimdLevel::kAvx512;
}

inline SimdLevel simd_level() {
  static const SimdLevel level = find_simd_level();
  return level;
}

// The chosen instruction set, named as in torch.
inline const char* instruction_set() {
  switch (simd_level()) {
    case SimdLevel::kAvx512:
      return "AVX512";
    case SimdLevel::kAvx2:
      return "AVX2";
    case SimdLevel::kBaseline:
      break;
  }
  return "DEFAULT";
}

template <typename Kernel, typename... Args>
__attribute__((target("avx2,fma,f16c"), noinline)) void run_with_avx2(Args... args) {
  Kernel::template run<Avx2>(args...);
}

template <typename Kernel, typename... Args>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"), noinline)) void
run_with_avx512(Args... args) {
  Kernel::template run<Avx512>(args...);
}

template <typename Kernel, typename... Args>
void dispatch_isa(Args... args) {
  switch (simd_level()) {
    case SimdLevel::kAvx512:
      return run_with_avx512<Kernel>(args...);
    case SimdLevel::kAvx2:
      return run_with_avx2<Kernel>(args...);
    case SimdLevel::kBaseline:
      return Kernel::template run<Baseline>(args...);
  }
}

template <typename Kernel, typename... Args>
__attribute__((target("avx2"), noinline)) void run_with_avx2_unfused(Args... args) {
  Kernel::template run<Avx2>(args...);
}

// Like dispatch_isa, but without fused multiply-add: the same bits on every processor.
template <typename Kernel, typename... Args>
void dispatch_unfused(Args... args) {
  if (simd_level() == SimdLevel::kBaseline) {
    return Kernel::template run<Baseline>(args...);
  }
  run_with_avx2_unfused<Kernel>(args...);
}

#else

inline const char* instruction_set() { return "DEFAULT"; }

template <typename Kernel, typename... Args>
void dispatch_isa(Args... args) {
  Kernel::template run<Baseline>(args...);
}

template <typename Kernel, typename... Args>
void dispatch_unfused(Args... args) {
  Kernel::template run<Baseline>(args...);
}

#endif

}  // namespace syncbn::cpu
