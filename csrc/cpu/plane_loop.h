// The element-wise loop over planes: a plane's values share the constants of one channel.
#pragma once

#include <algorithm>

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

  // The formula of a pack whose first `count` positions belong to `channel`, the others to `next`.
  template <typename Isa>
  static SYNCBN_INLINE Formula<Pack<A, Isa>> formula_of_two(const Job& job, int64_t channel,
                                                            int64_t next, int64_t count) {
    using P = Pack<A, Isa>;
    return job.constants.map([&](const A* constants) __attribute__((always_inline)) {
      return first_positions<T, Isa>(P::broadcast(constants[channel]),
                                     P::broadcast(constants[next]), count);
    });
  }

  // Packs are written in the order of memory and no line twice: a line that is written both into
  // the caches and past them takes many times as long. A plane is not shorter than a pack, so at
  // most two channels share a pack.
  template <bool kStream, typename Isa>
  static SYNCBN_INLINE void compute_planes(const Job& job, const Geometry& geometry, int64_t begin,
                                           int64_t end) {
    constexpr int kSize = Pack<A, Isa>::kSize;
    static_assert(kSize <= kShortPlane);
    const int64_t inner = geometry.inner;
    int64_t channel = begin / inner % geometry.channels;
    int64_t plane_end = begin - begin % inner + inner;
    int64_t at = begin;
    while (true) {
      const auto formula = formula_of_channel<Isa>(job, channel);
      const int64_t stop = std::min(plane_end, end);
      for (; at + kSize <= stop; at += kSize) {
        job.template compute<kStream>(formula, at);
      }
      if (at + kSize > end) {
        if (at < end) {  // the tensor's last values, all of one plane
          job.compute_last(formula, end, end - at);
        }
        return;
      }
      const int64_t next = channel + 1 == geometry.channels ? 0 : channel + 1;
      if (at < plane_end) {
        job.template compute<kStream>(formula_of_two<Isa>(job, channel, next, plane_end - at), at);
        at += kSize;
      }
      channel = next;
      plane_end += inner;
    }
  }

  // Computes the values from `begin` to `end`.
  template <typename Isa>
  static SYNCBN_INLINE void run(const Job* shared, const Geometry* geometry, int64_t begin,
                                int64_t end) {
    const Job job = *shared;  // a local copy, which stores cannot change
    if (job.stream) {
      compute_planes<true, Isa>(job, *geometry, begin, end);
      finish_streaming();
    } else {
      compute_planes<false, Isa>(job, *geometry, begin, end);
    }
  }
};

}  // namespace syncbn::cpu
