// The message that ranks add up. Forward: 2C+1 float64 values, the sum of each channel's values,
// the sum of their squares, and the number of values per channel. Backward: 2C values, two sums per
// channel. In a group both messages end with a tail and have the same length.
#pragma once

#include <cstdint>

#include "moments.h"

namespace syncbn {

// Three values after the count: fingerprint, next size and its square. Ranks add them up, too; the
// sums of next sizes and of their squares show whether all next sizes are equal.
struct Tail {
  bool present = false;
  double fingerprint = 0;  // identifies the pass
  double next_size = 0;    // length of the message that the rank expects to send next, or 0
};

SYNCBN_HOST_DEVICE constexpr int64_t size_with_tail(int64_t channels) { return 2 * channels + 4; }

// Writes the values after the 2C sums: the count and, if there is one, the tail.
SYNCBN_HOST_DEVICE inline void write_tail(double* message, int64_t channels, double count,
                                          const Tail& tail) {
  message[2 * channels] = count;
  if (tail.present) {
    message[2 * channels + 1] = tail.fingerprint;
    message[2 * channels + 2] = tail.next_size;
    message[2 * channels + 3] = tail.next_size * tail.next_size;
  }
}

// The expected sum of the ranks' fingerprints.
struct Expectation {
  bool present = false;
  double fingerprint_sum = 0;
};

enum class Status { kConsistent, kAborted, kDisagreement };

// A rank that aborts a pass sends a count of NaN.
SYNCBN_HOST_DEVICE inline Status verify_sums(double count, double fingerprint_sum,
                                             const Expectation& expectation) {
  if (count != count) {
    return Status::kAborted;
  }
  const bool agree = !expectation.present || fingerprint_sum == expectation.fingerprint_sum;
  return agree ? Status::kConsistent : Status::kDisagreement;
}

SYNCBN_HOST_DEVICE inline Status read_status(const double* totals, int64_t channels,
                                             const Expectation& expectation) {
  const double fingerprint_sum = expectation.present ? totals[2 * channels + 1] : 0;
  return verify_sums(totals[2 * channels], fingerprint_sum, expectation);
}

struct Sums {
  double values;
  double squares;
};

// The squares are computed from sum / count, the mean that from_sums() computes: a single process
// reads back its own moments except for one rounding of `squares`. The variance of equal values
// stays 0, unless the sums of several ranks were added up.
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
