// An element-wise operator as its loops see it: inputs and an output of one geometry.
#pragma once

#include <array>

#include "pack.h"

namespace syncbn::cpu {

template <template <typename> class Formula, typename T>
struct ElementwiseJob {
  using A = compute_t<T>;
  static constexpr int kInputs = Formula<A>::kInputs;

  std::array<const T*, kInputs> inputs;
  T* output;
  Formula<const A*> constants;  // a value per channel (planes) or per lane of a row (rows)
  bool stream;                  // the output bypasses the caches

  template <bool kStream, typename Isa>
  SYNCBN_INLINE void compute(const Formula<Pack<A, Isa>>& formula, int64_t at) const {
    Pack<A, Isa> values[kInputs];
    for (int i = 0; i < kInputs; ++i) {
      values[i] = load<T, Isa>(inputs[i] + at);
    }
    store<T, Isa, kStream>(formula(values), output + at);
  }

  // Computes the `count` values before `end`, fewer than a pack.
  template <typename Isa>
  SYNCBN_INLINE void compute_last(const Formula<Pack<A, Isa>>& formula, int64_t end,
                                  int64_t count) const {
    Pack<A, Isa> values[kInputs];
    for (int i = 0; i < kInputs; ++i) {
      values[i] = load_last<T, Isa>(inputs[i] + end, count);
    }
    store_last<T, Isa>(formula(values), output + end, count);
  }

  // Prefetches the memory that compute<kStream>() will access.
  template <bool kStream, Ahead kAhead, typename Isa>
  SYNCBN_INLINE void prefetch(int64_t at) const {
    for (const T* input : inputs) {
      prefetch_pack<Pack<A, Isa>, kAhead>(input + at);
    }
    if constexpr (!kStream) {
      prefetch_pack<Pack<A, Isa>, kAhead, /*kToWrite=*/true>(output + at);
    }
  }
};

// Makes stores that bypassed the caches visible before any later store.
SYNCBN_INLINE void finish_streaming() {
#if defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
#endif
}

}  // namespace syncbn::cpu
