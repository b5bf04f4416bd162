// The message that ranks add up. Forward: 2C+1 float64 values, the sum of each channel's values,
// the sum of their squares, and the number of values per channel. Backward: 2C values, two sums per
// channel. In a group both messages end with a tail and have the same length.
#pragma once

#include <cstdint>

#include "moments.h"

namespace syncbn {

// The values after the count, which the caller chooses. Ranks add them up, too.
constexpr int64_t kTailSize = 3;
struct Tail {
  bool present = false;
  double values[kTailSize] = {};
};

SYNCBN_HOST_DEVICE constexpr int64_t size_with_tail(int64_t channels) {
  return 2 * channels + 1 + kTailSize;
}

// Writes the values after the 2C sums: the count and, if there is one, the tail.
SYNCBN_HOST_DEVICE inline void write_tail(double* message, int64_t channels, double count,
                                          const Tail& tail) {
  message[2 * channels] = count;
  for (int64_t i = 0; tail.present && i < kTailSize; ++i) {
    message[2 * channels + 1 + i] = tail.values[i];
  }
}

// The expected sum of the first values of the ranks' tails.
struct Expectation {
  bool present = false;
  double tail_sum = 0;
};

enum class Status { kConsistent, kAborted, kDisagreement };

// A rank that aborts a pass sends a count of NaN.
SYNCBN_HOST_DEVICE inline Status verify_sums(double count, double tail_sum,
                                             const Expectation& expectation) {
  if (count != count) {
    return Status::kAborted;
  }
  const bool agree = !expectation.present || tail_sum == expectation.tail_sum;
  return agree ? Status::kConsistent : Status::kDisagreement;
}

// The sum of the tails comes after the count.
SYNCBN_HOST_DEVICE inline Status read_status(const double* count, const Expectation& expectation) {
  return verify_sums(*count, expectation.present ? count[1] : 0, expectation);
}

struct Sums {
  double values;
  double squares;
};

// The squares are computed from sum / count, the mean that from_sums() computes: a single process
// reads back its own moments except for one rounding of `squares`. The variance of equal values
// stays 0, unless sums were added up: of several ranks, or of several blocks of a CUDA kernel.
SYNCBN_HOST_DEVICE inline Sums to_sums(const Moments<double>& moments) {
  if (moments.count == 0) {
    return {0, 0};
  }
  const double sum = rounded_product(moments.count, moments.mean);
  return {sum, moments.m2 + rounded_product(sum, sum / moments.count)};
}

// The inverse. The subtraction has a relative error of about 1.1e-16 * (1 + mean^2 / variance),
// less than float32's rounding while |mean| < 2e4 standard deviations. A count of zero gives zeros,
// not NaN.
SYNCBN_HOST_DEVICE inline Moments<double> from_sums(const Sums& sums, double count) {
  Moments<double> moments;
  moments.count = count;
  if (count == 0) {
    return moments;
  }
  moments.mean = sums.values / count;
  moments.m2 = sums.squares - rounded_product(sums.values, moments.mean);
  if (moments.m2 < 0) {  // only by rounding; not std::max: a NaN must stay a NaN
    moments.m2 = 0;
  }
  return moments;
}

SYNCBN_HOST_DEVICE inline Moments<double> read_message(const double* totals, int64_t channels,
                                                       int64_t channel) {
  return from_sums({totals[channel], totals[channels + channel]}, totals[2 * channels]);
}

}  // namespace syncbn
