// The formulas of the terms that reductions add up: for each value a weight, and the product of the
// weight and the deviation x - center; center is the mean rounded to the type of the computation.
// CUDA kernels and CPU operators share them.
//
// They are structs like the formulas of formulas.h. With kStores the weights, the gradient of a
// tensor, are written, too.
#pragma once

#include "activations.h"

namespace syncbn {

// Formulas return expressions: GCC 12 copies a named pack that is used twice through memory, in
// parts, when it compiles for AVX2.
template <typename V>
struct Term {
  V weight;
  V deviation;
};

// For the statistics: the weight is the deviation.
template <typename V>
struct DeviationTerms {
  static constexpr int kInputs = 1;
  static constexpr int kConstants = 1;
  static constexpr bool kStores = false;
  static constexpr bool kIsLong = false;

  V center;

  template <typename Function>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE auto map(const Function& function) const {
    return DeviationTerms<decltype(function(center))>{function(center)};
  }
  SYNCBN_HOST_DEVICE SYNCBN_INLINE Term<V> operator()(const V (&inputs)[kInputs]) const {
    return {inputs[0] - center, inputs[0] - center};
  }
};

// For the backward pass without an activation, from dy and x.
template <typename V>
struct GradTerms {
  static constexpr int kInputs = 2;
  static constexpr int kConstants = 1;
  static constexpr bool kStores = false;
  static constexpr bool kIsLong = false;

  V center;

  template <typename Function>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE auto map(const Function& function) const {
    return GradTerms<decltype(function(center))>{function(center)};
  }
  SYNCBN_HOST_DEVICE SYNCBN_INLINE Term<V> operator()(const V (&inputs)[kInputs]) const {
    const auto& [dy, x] = inputs;
    return {dy, x - center};
  }
};

// For the backward pass with an activation whose argument z is computed again, from dy, x and, if
// there is one, the residual.
template <typename Act, bool kWithResidual, bool kStoresGradient = kWithResidual>
struct GradTermsWithEpilogue {
  template <typename V>
  struct Formula {
    static constexpr int kInputs = kWithResidual ? 3 : 2;
    static constexpr int kConstants = 3;
    static constexpr bool kStores = kStoresGradient;
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
    SYNCBN_HOST_DEVICE SYNCBN_INLINE Term<V> operator()(const V (&inputs)[kInputs]) const {
      V z = multiply_add(inputs[1] - center, scale, shift);
      if constexpr (kWithResidual) {
        z = z + inputs[2];
      }
      return {activation.gradient(inputs[0], z), inputs[1] - center};
    }
  };
};

// The same for an activation whose output has the sign of z, from dy, x and the output.
template <typename Act>
struct GradTermsFromOutput {
  template <typename V>
  struct Formula {
    static constexpr int kInputs = 3;
    static constexpr int kConstants = 1;
    static constexpr bool kStores = true;
    static constexpr bool kIsLong = false;

    V center;
    Act activation;

    template <typename Function>
    SYNCBN_HOST_DEVICE SYNCBN_INLINE auto map(const Function& function) const {
      return Formula<decltype(function(center))>{function(center), activation};
    }
    SYNCBN_HOST_DEVICE SYNCBN_INLINE Term<V> operator()(const V (&inputs)[kInputs]) const {
      const auto& [dy, x, output] = inputs;
      return {activation.gradient(dy, output), x - center};
    }
  };
};

}  // namespace syncbn
