// The update of a channel's running statistics.
#pragma once

#include <cmath>

#include "moments.h"

namespace syncbn {

// Moves mean and variance by `factor` toward the batch's mean and unbiased variance. Statistics
// that would not be finite in their dtype keep their values: one overflowed step under loss scaling
// must not spoil the model. A cumulative average becomes NaN instead, as in torch: all channels
// share the number of batches, so no channel can skip a batch. Products are rounded, so that ranks
// with different processors get the same bits.
SYNCBN_HOST_DEVICE inline void update_running(double& mean, double& variance,
                                              const Moments<double>& batch, double factor,
                                              bool cumulative, double largest_mean,
                                              double largest_variance) {
  const double keep = 1 - factor;
  const double new_mean = rounded_product(keep, mean) + rounded_product(factor, batch.mean);
  const double new_variance =
      rounded_product(keep, variance) + rounded_product(factor, batch.unbiased_variance());
  const bool finite =
      -largest_mean <= new_mean && new_mean <= largest_mean && new_variance <= largest_variance;
  if (finite || cumulative) {
    mean = finite ? new_mean : NAN;
    variance = finite ? new_variance : NAN;
  }
}

}  // namespace syncbn
