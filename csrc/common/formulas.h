// The formulas of the element-wise operators, and the constants of a channel that they compute
// with. Includes no torch header: CUDA kernels and the CPU operators share it.
//
// Values are computed in float32, those of float64 inputs in float64. A float32 does not hold a
// large mean exactly, so x - center is computed, center being the mean rounded to that type, and
// what the rounding left of the mean is part of the shift.
//
// A formula is a struct of its constants, each of type V: one number or several to compute with, or
// a pointer to the constants of all channels. map() returns the same struct over another type.
#pragma once

#include "host_device.h"

namespace syncbn {

// y = (x - center) * scale + shift
template <typename V>
struct Normalize {
  static constexpr int kInputs = 1;

  V center;
  V scale;
  V shift;

  template <typename Function>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE auto map(const Function& function) const {
    return Normalize<decltype(function(center))>{function(center), function(scale),
                                                 function(shift)};
  }
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V operator()(const V (&inputs)[kInputs]) const {
    const auto& [x] = inputs;
    return (x - center) * scale + shift;
  }
};

SYNCBN_HOST_DEVICE inline Normalize<double> normalize_constants(double mean, double center,
                                                                double invstd, double weight,
                                                                double bias) {
  const double scale = weight * invstd;
  return {center, scale, bias - (mean - center) * scale};
}

// dx = dy * scale + ((x - center) * slope + shift), which is
// (dy - sum_dy / count - (x - mean) * invstd * sum_dy_xhat / count) * weight * invstd multiplied
// out.
template <typename V>
struct GradInput {
  static constexpr int kInputs = 2;

  V center;
  V slope;
  V shift;
  V scale;

  template <typename Function>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE auto map(const Function& function) const {
    return GradInput<decltype(function(center))>{function(center), function(slope), function(shift),
                                                 function(scale)};
  }
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V operator()(const V (&inputs)[kInputs]) const {
    const auto& [dy, x] = inputs;
    return dy * scale + ((x - center) * slope + shift);
  }
};

// `count` is that of the group, but 1 where the group has no values: its sums are zero then.
SYNCBN_HOST_DEVICE inline GradInput<double> grad_input_constants(double mean, double center,
                                                                 double invstd, double weight,
                                                                 double sum_dy, double sum_dy_xhat,
                                                                 double count) {
  const double scale = weight * invstd;
  const double slope = -scale * invstd * (sum_dy_xhat / count);
  return {center, slope, -scale * (sum_dy / count) - (mean - center) * slope, scale};
}

}  // namespace syncbn
