// How the running statistics of a channel follow the batches. Includes no torch header.
#pragma once

#include "moments.h"

namespace syncbn {

// Moves them by `factor` toward the batch's mean and unbiased variance. Where they would not be
// finite in their dtype, they stay: one overflowed step under loss scaling must not spoil the model
// for good.
SYNCBN_HOST_DEVICE inline void update_running(double& mean, double& variance, const Moments& batch,
                                              double factor, double largest_mean,
                                              double largest_variance) {
  const double new_mean = (1 - factor) * mean + factor * batch.mean;
  const double new_variance = (1 - factor) * variance + factor * batch.unbiased_variance();
  if (-largest_mean <= new_mean && new_mean <= largest_mean && new_variance <= largest_variance) {
    mean = new_mean;
    variance = new_variance;
  }
}

}  // namespace syncbn
