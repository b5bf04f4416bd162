// Count, mean and sum of squared deviations of a set of values, and their exact merge.
//
// Chan, Golub, LeVeque, "Algorithms for computing the sample variance" (1983). Includes no torch
// header: CUDA kernels and the CPU operators share it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SYNCBN_HOST_DEVICE __host__ __device__
#else
#define SYNCBN_HOST_DEVICE
#endif

namespace syncbn {

struct Moments {
  double count = 0;
  double mean = 0;
  double m2 = 0;  // sum of (x - mean)^2

  SYNCBN_HOST_DEVICE double variance() const { return m2 / (count > 1 ? count : 1); }
  SYNCBN_HOST_DEVICE double unbiased_variance() const { return m2 / (count > 2 ? count - 1 : 1); }

  SYNCBN_HOST_DEVICE void merge(const Moments& other) {
    if (other.count == 0) {
      return;
    }
    const double total = count + other.count;
    const double delta = other.mean - mean;
    const double share = other.count / total;
    mean += delta * share;
    m2 += other.m2 + delta * delta * count * share;
    count = total;
  }
};

// The message that ranks add up is 2C+1 float64 values: for each channel the sum of its values,
// for each channel the sum of their squares, and the number of values per channel.
SYNCBN_HOST_DEVICE inline void write_message(double* message, int64_t channels, int64_t channel,
                                             const Moments& moments) {
  const double sum = moments.count * moments.mean;
  message[channel] = sum;
  message[channels + channel] = moments.m2 + sum * moments.mean;
  if (channel == 0) {
    message[2 * channels] = moments.count;
  }
}

// The inverse, on the message summed over all ranks. The subtraction costs a relative error of
// about 1.1e-16 * mean^2 / variance, which float64 keeps below float32's rounding while
// |mean| < 2e4 standard deviations. A count of zero gives zeros, not NaN.
SYNCBN_HOST_DEVICE inline Moments read_message(const double* totals, int64_t channels,
                                               int64_t channel) {
  Moments moments;
  moments.count = totals[2 * channels];
  if (moments.count == 0) {
    return moments;
  }
  moments.mean = totals[channel] / moments.count;
  moments.m2 = totals[channels + channel] - totals[channel] * moments.mean;
  if (moments.m2 < 0) {  // by rounding only; a NaN must stay a NaN
    moments.m2 = 0;
  }
  return moments;
}

}  // namespace syncbn
