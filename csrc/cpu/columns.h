// The columns of a matrix in packs.
#pragma once

#include <algorithm>

#include "pack.h"
#include "partition.h"

namespace syncbn::cpu {

// The last pack may overlap the pack before it. A narrow matrix has fewer columns than a pack: they
// are the last positions of one pack, whose first positions are unused.
template <typename T, typename Isa>
struct Columns {
  static constexpr int kSize = Pack<compute_t<T>, Isa>::kSize;

  int64_t width;

  int64_t packs() const { return ceil_div(width, kSize); }
  int64_t lanes() const { return packs() * kSize; }
  bool narrow() const { return width < kSize; }
  // The first column of pack number `pack`; negative if the matrix is narrow.
  int64_t first(int64_t pack) const { return std::min((pack + 1) * kSize, width) - kSize; }

  // Calls function(lane, column) for each column; the lanes of all packs are numbered
  // consecutively.
  template <typename Function>
  SYNCBN_INLINE void for_each_lane(const Function& function) const {
    for (int64_t pack = 0; pack < packs(); ++pack) {
      // Positions at equal distances, which compilers vectorize: bfloat16's even ones first.
      constexpr int kFirstLanes = std::is_same_v<T, BFloat16> ? kSize / 2 : kSize;
      for_lanes<0, kFirstLanes>(pack, function);
      for_lanes<kFirstLanes, kSize>(pack, function);
    }
  }

  SYNCBN_INLINE Pack<compute_t<T>, Isa> load_pack(const T* row, int64_t pack) const {
    return narrow() ? load_last<T, Isa>(row + width, width) : load<T, Isa>(row + first(pack));
  }

 private:
  template <int kBegin, int kEnd, typename Function>
  SYNCBN_INLINE void for_lanes(int64_t pack, const Function& function) const {
    SYNCBN_INDEPENDENT
    for (int lane = kBegin; lane < kEnd; ++lane) {
      const int64_t column = first(pack) + position_of_lane<T, Isa>(lane);
      if (!narrow() || column >= 0) {
        function(pack * kSize + lane, column);
      }
    }
  }
};

}  // namespace syncbn::cpu
