// The formulas of the terms that reductions add up: of each value a weight, and the product of that
// weight and the deviation x - center, center being the mean rounded to the type that is computed
// in. Includes no torch header: CUDA kernels and the CPU operators share it.
//
// They are structs as those of formulas.h. kStores says that the weights, being the gradient of a
// tensor, are written as well.
#pragma once

#include "activations.h"

namespace syncbn {

// Made of expressions: a pack with a name that is used twice is copied through memory, in pieces,
// by GCC 12 where it compiles for AVX2.
template <typename V>
struct Term {
  V weight;
  V deviation;
};

// The statistics: the deviation is its own weight.
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

// The backward pass of a batch norm alone, of dy and x.
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

// Through an activation, whose argument is computed again: of dy, x and, where there is one, the
// residual.
template <typename Act, bool kWithResidual, bool kStoresGradient = kWithResidual>
struct GradTermsThrough {
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

// Through an activation with a residual whose output has the sign of its argument: of dy, x and
// the output.
template <typename Act>
struct GradTermsBehind {
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
