// The constants of a channel that the element-wise operators compute with. Includes no torch
// header: CUDA kernels and the CPU operators share it.
//
// Values are computed in float32, those of float64 inputs in float64. A float32 does not hold a
// large mean exactly, so x - center is computed, center being the mean rounded to that type, and
// what the rounding left of the mean is part of the shift.
#pragma once

#include "moments.h"

namespace syncbn {

// y = (x - center) * scale + shift
struct NormalizeConstants {
  double center;
  double scale;
  double shift;
};

SYNCBN_HOST_DEVICE inline NormalizeConstants normalize_constants(double mean, double center,
                                                                 double invstd, double weight,
                                                                 double bias) {
  const double scale = weight * invstd;
  return {center, scale, bias - (mean - center) * scale};
}

// dx = dy * scale + ((x - center) * slope + shift), which is
// (dy - sum_dy / count - (x - mean) * invstd * sum_dy_xhat / count) * weight * invstd multiplied
// out.
struct GradInputConstants {
  double center;
  double slope;
  double shift;
  double scale;
};

// `count` is that of the group, but 1 where the group has no values: its sums are zero then.
SYNCBN_HOST_DEVICE inline GradInputConstants grad_input_constants(double mean, double center,
                                                                  double invstd, double weight,
                                                                  double sum_dy, double sum_dy_xhat,
                                                                  double count) {
  const double scale = weight * invstd;
  const double slope = -scale * invstd * (sum_dy_xhat / count);
  return {center, slope, -scale * (sum_dy / count) - (mean - center) * slope, scale};
}

}  // namespace syncbn
