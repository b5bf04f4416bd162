// The element-wise loop over rows: each lane of a row has its own constants.
#pragma once

#include <algorithm>

#include "columns.h"
#include "elementwise_job.h"
#include "partition.h"

namespace syncbn::cpu {

template <template <typename> class Formula, typename T>
struct RowLoop {
  using Job = ElementwiseJob<Formula, T>;
  using A = compute_t<T>;

  template <typename Isa>
  static SYNCBN_INLINE Formula<Pack<A, Isa>> formula_of_lanes(const Job& job, int64_t lane) {
    return job.constants.map([&](const A* constants) __attribute__((always_inline)) {
      return Pack<A, Isa>::read(constants + lane);
    });
  }

  // Four rows are computed side by side and read the constants once; the rows after them are
  // prefetched one after another, the fastest order for memory. With vectors of a whole line one
  // row at a time is fastest (measured on Zen 4).
  template <bool kStream, typename Isa>
  static SYNCBN_INLINE void compute_rows(const Job& job, int64_t width, int64_t begin,
                                         int64_t rows) {
    constexpr int kSize = Pack<A, Isa>::kSize;
    const Columns<T, Isa> columns{width};
    const int64_t lanes = columns.lanes();
    constexpr Ahead kAhead = kStream ? Ahead::kAllLines : Ahead::kFirstLine;
    constexpr bool kSideBySide = Isa::kVectorBytes < kLine;
    const int64_t ahead = round_up(kPrefetchBytes / sizeof(T), 4 * width);
    int64_t row = 0;
    for (; kSideBySide && row + 4 <= rows && !columns.narrow(); row += 4) {
      const int64_t first = begin + row * width;
      for (int64_t lane = 0; lane < lanes; lane += kSize) {
        const auto formula = formula_of_lanes<Isa>(job, lane);
        const int64_t at = first + std::min(lane, width - kSize);
        for (int i = 0; i < 4; ++i) {
          job.template prefetch<kStream, kAhead, Isa>(first + ahead + 4 * lane + i * kSize);
          job.template compute<kStream>(formula, at + i * width);
        }
      }
    }
    for (; row < rows; ++row) {
      const int64_t first = begin + row * width;
      if (columns.narrow()) {
        job.compute_last(formula_of_lanes<Isa>(job, 0), first + width, width);
        continue;
      }
      for (int64_t lane = 0; lane < lanes; lane += kSize) {
        const int64_t at = first + std::min(lane, width - kSize);
        job.template compute<kStream>(formula_of_lanes<Isa>(job, lane), at);
      }
    }
  }

  // Computes `rows` rows of `width` values, from value `begin` on.
  template <typename Isa>
  static SYNCBN_INLINE void run(const Job* shared, int64_t width, int64_t begin, int64_t rows) {
    const Job job = *shared;  // a local copy, which stores cannot change
    constexpr size_t kAlignment = std::min<size_t>(kLine, Pack<A, Isa>::kSize * sizeof(T));
    const bool aligned = reinterpret_cast<size_t>(job.output + begin) % kAlignment == 0 &&
                         width * sizeof(T) % kAlignment == 0;
    if (job.stream && aligned) {
      compute_rows<true, Isa>(job, width, begin, rows);
      finish_streaming();
    } else {
      compute_rows<false, Isa>(job, width, begin, rows);
    }
  }
};

}  // namespace syncbn::cpu
