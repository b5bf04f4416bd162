// The formulas of the element-wise operators and the constants of a channel. CUDA kernels and CPU
// operators share them.
//
// Values are computed in float32, float64 inputs in float64. A float32 does not hold a large mean
// exactly: formulas subtract `center`, the mean rounded to that type, and the rest of the mean is
// part of the shift.
//
// A formula is a struct of constants of type V: numbers, packs of numbers, or pointers to the
// constants of all channels. map() returns the same formula over another type. All channels have
// one activation.
#pragma once

#include "activations.h"

namespace syncbn {

// y = activation(z), z = (x - center) * scale + shift, or that plus a residual.
template <typename Act, bool kWithResidual>
struct NormalizeWithEpilogue {
  template <typename V>
  struct Formula {
    static constexpr int kInputs = kWithResidual ? 2 : 1;
    static constexpr int kConstants = 3;
    static constexpr bool kIsLong = Act::kIsLong;

    V center;
    V scale;
    V shift;
    Act activation;

    template <typename Function>
    SYNCBN_HOST_DEVICE SYNCBN_INLINE auto map(const Function& function) const {
      return Formula<decltype(function(center))>{function(center), function(scale), function(shift),
                                                 activation};
    }
    SYNCBN_HOST_DEVICE SYNCBN_INLINE V operator()(const V (&inputs)[kInputs]) const {
      V z = multiply_add(inputs[0] - center, scale, shift);
      if constexpr (kWithResidual) {
        z = z + inputs[1];
      }
      return activation.value(z);
    }
  };
};

template <typename V>
using Normalize = NormalizeWithEpilogue<NoActivation, false>::Formula<V>;

SYNCBN_HOST_DEVICE inline Normalize<double> normalize_constants(double mean, double center,
                                                                double invstd, double weight,
                                                                double bias) {
  const double scale = weight * invstd;
  return {center, scale, bias - (mean - center) * scale, {}};
}

// dx = dy * scale + ((x - center) * slope + shift): the expanded form of
// (dy - sum_dy / count - (x - mean) * invstd * sum_dy_xhat / count) * weight * invstd.
template <typename V>
struct GradInput {
  static constexpr int kInputs = 2;
  static constexpr int kConstants = 4;
  static constexpr bool kIsLong = false;

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
    return multiply_add(dy, scale, multiply_add(x - center, slope, shift));
  }
};

// `count` is the group's number of values per channel, or 1 if the group is empty: its sums are
// zero then.
SYNCBN_HOST_DEVICE inline GradInput<double> grad_input_constants(double mean, double center,
                                                                 double invstd, double weight,
                                                                 double sum_dy, double sum_dy_xhat,
                                                                 double count) {
  const double scale = weight * invstd;
  const double slope = -scale * invstd * (sum_dy_xhat / count);
  return {center, slope, -scale * (sum_dy / count) - (mean - center) * slope, scale};
}

// The same with activation.gradient(dy, z) in place of dy; z is computed again from x.
template <typename Act>
struct GradInputWithEpilogue {
  template <typename V>
  struct Formula {
    static constexpr int kInputs = 2;
    static constexpr int kConstants = 5;
    static constexpr bool kIsLong = Act::kIsLong;

    GradInput<V> grad_input;
    V forward_shift;
    Act activation;

    template <typename Function>
    SYNCBN_HOST_DEVICE SYNCBN_INLINE auto map(const Function& function) const {
      return Formula<decltype(function(forward_shift))>{grad_input.map(function),
                                                        function(forward_shift), activation};
    }
    SYNCBN_HOST_DEVICE SYNCBN_INLINE V operator()(const V (&inputs)[kInputs]) const {
      const auto& [dy, x] = inputs;
      const V z = multiply_add(x - grad_input.center, grad_input.scale, forward_shift);
      return grad_input({activation.gradient(dy, z), x});
    }
  };
};

}  // namespace syncbn
