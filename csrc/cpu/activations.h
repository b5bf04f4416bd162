// ReLU and leaky ReLU of one number or of a pack (pack.h), and the choice of an activation.
#pragma once

#include "../common/activations.h"

namespace syncbn::cpu {

// x > bound ? if_true : if_false
template <typename A>
SYNCBN_INLINE A where_greater(A x, A bound, A if_true, A if_false) {
  return x > bound ? if_true : if_false;
}

// x <= bound ? 0 : otherwise
template <typename A>
SYNCBN_INLINE A zero_where_at_most(A x, A bound, A otherwise) {
  return x <= bound ? 0 : otherwise;
}

// max(z, 0), but NaN where z is NaN.
template <typename A>
struct Relu {
  static constexpr bool kIsLong = false;
  static constexpr bool kFromOutput = true;

  A largest_zero;  // of the tensor's dtype

  template <typename V>
  SYNCBN_INLINE V value(const V& z) const {
    return zero_where_at_most(z, largest_zero, z);
  }
  template <typename V>
  SYNCBN_INLINE V gradient(const V& dy, const V& z) const {
    return zero_where_at_most(z, largest_zero, dy);
  }
};

// z > 0 ? z : z * negative_slope
template <typename A>
struct LeakyRelu {
  static constexpr bool kIsLong = false;
  static constexpr bool kFromOutput = true;

  A largest_zero;  // of the tensor's dtype
  A negative_slope;

  template <typename V>
  SYNCBN_INLINE V value(const V& z) const {
    return where_greater(z, largest_zero, z, z * negative_slope);
  }
  template <typename V>
  SYNCBN_INLINE V gradient(const V& dy, const V& z) const {
    return where_greater(z, largest_zero, dy, dy * negative_slope);
  }
};

// Calls function(activation): the activation computes in A, for tensors of the dtype.
template <typename A, typename Function>
void dispatch_activation(const ActivationChoice& choice, DType dtype, const Function& function) {
  const A zero = static_cast<A>(largest_zero(dtype));
  switch (choice.kind) {
    case Activation::kNone:
      return function(NoActivation{});
    case Activation::kRelu:
      return function(Relu<A>{zero});
    case Activation::kLeakyRelu:
      return function(LeakyRelu<A>{zero, static_cast<A>(choice.negative_slope)});
    case Activation::kSilu:
      return function(Silu{});
  }
}

}  // namespace syncbn::cpu
