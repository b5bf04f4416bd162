// Count, mean and sum of squared deviations of a set of values, and their exact merge: Chan, Golub,
// LeVeque, "Algorithms for computing the sample variance" (1983). CUDA kernels and CPU operators
// share them.
#pragma once

#include "host_device.h"

namespace syncbn {

// Merges `count` values of one channel with another set; `share` is the other set's share of the
// merged set. Channels with equal counts share one division. The square of a large delta may be
// infinite, but not with a count of 0.
template <typename A>
SYNCBN_HOST_DEVICE inline void merge_channel(A& mean, A& m2, A count, A other_mean, A other_m2,
                                             A share) {
  const A delta = other_mean - mean;
  mean += delta * share;
  m2 += other_m2 + delta * (delta * (count * share));
}

template <typename A>
struct Moments {
  A count = 0;
  A mean = 0;
  A m2 = 0;  // sum of (x - mean)^2

  SYNCBN_HOST_DEVICE A variance() const { return m2 / (count > 1 ? count : 1); }
  SYNCBN_HOST_DEVICE A unbiased_variance() const { return m2 / (count > 2 ? count - 1 : 1); }

  SYNCBN_HOST_DEVICE void merge(const Moments& other) {
    if (other.count == 0) {
      return;
    }
    const A total = count + other.count;
    merge_channel(mean, m2, count, other.mean, other.m2, other.count / total);
    count = total;
  }
};

}  // namespace syncbn
