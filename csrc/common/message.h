// The message that ranks add up, forward: 2C+1 float64 values, for each channel the sum of its
// values, for each channel the sum of their squares, and the number of values per channel. Includes
// no torch header.
//
// Backward it is two sums per channel. In a group, messages of both directions are of one length
// and end with a tail.
#pragma once

#include <cstdint>

#include "moments.h"

namespace syncbn {

// What a rank says of itself in a message: 3 values behind the count, which ranks add up as well.
// The last is the square of the next size: both sums together tell whether all next sizes are
// equal.
struct Tail {
  bool present = false;
  double fingerprint = 0;  // a number for what the rank does
  double next_size = 0;    // the length of the message that it expects to send next, or 0
};

// The length of a message with a tail, in both directions.
SYNCBN_HOST_DEVICE constexpr int64_t size_with_tail(int64_t channels) { return 2 * channels + 4; }

// Writes all that comes behind the 2C sums.
SYNCBN_HOST_DEVICE inline void write_tail(double* message, int64_t channels, double count,
                                          const Tail& tail) {
  message[2 * channels] = count;
  if (tail.present) {
    message[2 * channels + 1] = tail.fingerprint;
    message[2 * channels + 2] = tail.next_size;
    message[2 * channels + 3] = tail.next_size * tail.next_size;
  }
}

// What the ranks' tails must add up to.
struct Expectation {
  bool present = false;
  double fingerprint_sum = 0;
};

enum class Status { kConsistent, kAborted, kDisagreement };

// A rank that aborts a pass sends a count of NaN. `fingerprint_sum` is looked at where one is
// expected.
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

// The squares are those about zero of the mean that from_sums() will find, so that a process alone
// reads back what it wrote but for one rounding of `squares`: 0 for equal values, unless several
// such sums were added up.
SYNCBN_HOST_DEVICE inline Sums to_sums(const Moments<double>& moments) {
  if (moments.count == 0) {
    return {0, 0};
  }
  const double sum = rounded_product(moments.count, moments.mean);
  return {sum, moments.m2 + rounded_product(sum, sum / moments.count)};
}

// The inverse, on sums over all ranks. The subtraction costs a relative error of about
// 1.1e-16 * (1 + mean^2 / variance), which float64 keeps below float32's rounding while
// |mean| < 2e4 standard deviations. A count of zero gives zeros, not NaN.
SYNCBN_HOST_DEVICE inline Moments<double> from_sums(const Sums& sums, double count) {
  Moments<double> moments;
  moments.count = count;
  if (count == 0) {
    return moments;
  }
  moments.mean = sums.values / count;
  moments.m2 = sums.squares - rounded_product(sums.values, moments.mean);
  if (moments.m2 < 0) {  // by rounding only; a NaN must stay a NaN
    moments.m2 = 0;
  }
  return moments;
}

SYNCBN_HOST_DEVICE inline Moments<double> read_message(const double* totals, int64_t channels,
                                                       int64_t channel) {
  return from_sums({totals[channel], totals[channels + channel]}, totals[2 * channels]);
}

}  // namespace syncbn
