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

// a * b, rounded. A compiler that fused it with a sum would round what is written to the message
// and what is read from it differently. On x86-64 the CPU operators run this unfused (simd.h).
SYNCBN_HOST_DEVICE inline double rounded_product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#elif defined(__x86_64__) && !defined(__FMA__)
  return a * b;
#else
  double product = a * b;
  asm("" : "+m"(product));  // what follows does not see the multiplication
  return product;
#endif
}

// The message that ranks add up is 2C+1 float64 values: for each channel the sum of its values,
// for each channel the sum of their squares, and the number of values per channel.
struct Sums {
  double values;
  double squares;
};

// The squares are those about zero of the mean that from_sums() will find, so that a process alone
// reads back what it wrote but for one rounding of `squares`: 0 for equal values.
SYNCBN_HOST_DEVICE inline Sums to_sums(const Moments& moments) {
  if (moments.count == 0) {
    return {0, 0};
  }
  const double sum = rounded_product(moments.count, moments.mean);
  return {sum, moments.m2 + rounded_product(sum, sum / moments.count)};
}

// The inverse, on sums over all ranks. The subtraction costs a relative error of about
// 1.1e-16 * (1 + mean^2 / variance), which float64 keeps below float32's rounding while
// |mean| < 2e4 standard deviations. A count of zero gives zeros, not NaN.
SYNCBN_HOST_DEVICE inline Moments from_sums(const Sums& sums, double count) {
  Moments moments;
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

SYNCBN_HOST_DEVICE inline Moments read_message(const double* totals, int64_t channels,
                                               int64_t channel) {
  return from_sums({totals[channel], totals[channels + channel]}, totals[2 * channels]);
}

}  // namespace syncbn
