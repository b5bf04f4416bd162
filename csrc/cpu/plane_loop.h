// The element-wise loop over planes: all values of a plane have the constants of one channel.
#pragma once

#include <algorithm>

#include "cache.h"
#include "elementwise_job.h"
#include "partition.h"

namespace syncbn::cpu {

template <template <typename> class Formula, typename T>
struct PlaneLoop {
  using Job = ElementwiseJob<Formula, T>;
  using A = compute_t<T>;

  template <typename Isa>
  static SYNCBN_INLINE Formula<Pack<A, Isa>> formula_of_channel(const Job& job, int64_t channel) {
    return job.constants.map([&](const A* constants) __attribute__((always_inline)) {
      return Pack<A, Isa>::broadcast(constants[channel]);
    });
  }

  // Values of one channel, from `begin` to `end`. The last pack, and the first one before what is
  // streamed, may overlap their neighbors.
  template <bool kStream, typename Isa>
  static SYNCBN_INLINE void compute_plane(const Job& job, const Formula<Pack<A, Isa>>& formula,
                                          int64_t begin, int64_t end) {
    constexpr int kSize = Pack<A, Isa>::kSize;
    if (end - begin < kSize) {
      return job.compute_last(formula, end, end - begin);
    }
    int64_t at = begin;
    if constexpr (kStream) {
      // Streaming begins at the next aligned address: what is skipped, less than a pack, has been
      // written.
      constexpr size_t kAlignment = std::min<size_t>(kLine, kSize * sizeof(T));
      job.template compute<false>(formula, at);
      at += (-reinterpret_cast<size_t>(job.output + at) % kAlignment) / sizeof(T);
    }
    // A step takes a line at least, which is what is read ahead.
    constexpr int kLinePacks = std::max<int>(kLine / (kSize * sizeof(T)), 1);
    for (; at + kLinePacks * kSize <= end; at += kLinePacks * kSize) {
      if constexpr (!kStream) {  // memory, a single stream, is fast enough by itself
        job.template prefetch<kStream, Ahead::kFirstLine, Isa>(at + kPrefetchBytes / sizeof(T));
      }
      for (int i = 0; i < kLinePacks; ++i) {
        job.template compute<kStream>(formula, at + i * kSize);
      }
    }
    for (; at + kSize <= end; at += kSize) {
      job.template compute<kStream>(formula, at);
    }
    if (at < end) {
      job.template compute<false>(formula, end - kSize);
    }
  }

  template <bool kStream, typename Isa>
  static SYNCBN_INLINE void compute_planes(const Job& job, const Geometry& geometry, int64_t begin,
                                           int64_t end) {
    const int64_t inner = geometry.inner;
    const int64_t channels = geometry.channels;
    int64_t channel = begin / inner % channels;
    int64_t plane_end = begin - begin % inner + inner;
    for (int64_t first = begin; first < end; first = plane_end, plane_end += inner) {
      compute_plane<kStream>(job, formula_of_channel<Isa>(job, channel), first,
                             std::min(plane_end, end));
      channel = channel + 1 == channels ? 0 : channel + 1;
    }
  }

  // The values from `begin` to `end` of the tensors, in the order of memory.
  template <typename Isa>
  static SYNCBN_INLINE void run(const Job* shared, const Geometry* geometry, int64_t begin,
                                int64_t end) {
    const Job job = *shared;  // which stores cannot change
    if (job.stream) {
      compute_planes<true, Isa>(job, *geometry, begin, end);
      finish_streaming();
    } else {
      compute_planes<false, Isa>(job, *geometry, begin, end);
    }
  }
};

}  // namespace syncbn::cpu
