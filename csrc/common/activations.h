// The activations that may follow a batch norm, and their derivatives. Includes no torch header:
// CUDA kernels and the CPU operators share it.
//
// An activation is a struct with value(z) and gradient(dy, z), which is dy times the derivative at
// z. Both take z as it was computed, but treat as zero what the tensor's dtype would: a positive z
// that rounds to zero there has the derivative of zero.
#pragma once

#include <cmath>

#include "dtype.h"

namespace syncbn {

// The numbers are those of the schemas, and of NUMBERS in syncbn/activations.py.
enum class Activation { kNone = 0, kRelu = 1, kLeakyRelu = 2, kSilu = 3 };
constexpr int kNumActivations = 4;

struct ActivationChoice {
  Activation kind = Activation::kNone;
  double negative_slope = 0;
};

// What packs (csrc/cpu/pack.h) have as well. A product and a sum are rounded once, on the CPU where
// the instruction set can: a forward and a backward pass then find the same z.
SYNCBN_HOST_DEVICE SYNCBN_INLINE float multiply_add(float x, float y, float z) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(x, y, z);
#else
  return std::fma(x, y, z);
#endif
}
SYNCBN_HOST_DEVICE SYNCBN_INLINE double multiply_add(double x, double y, double z) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(x, y, z);
#else
  return std::fma(x, y, z);
#endif
}

// x > bound ? if_true : if_false
SYNCBN_HOST_DEVICE SYNCBN_INLINE float where_greater(float x, float bound, float if_true,
                                                     float if_false) {
  return x > bound ? if_true : if_false;
}
SYNCBN_HOST_DEVICE SYNCBN_INLINE double where_greater(double x, double bound, double if_true,
                                                      double if_false) {
  return x > bound ? if_true : if_false;
}

// x <= bound ? 0 : otherwise
SYNCBN_HOST_DEVICE SYNCBN_INLINE float zero_where_at_most(float x, float bound, float otherwise) {
  return x <= bound ? 0 : otherwise;
}
SYNCBN_HOST_DEVICE SYNCBN_INLINE double zero_where_at_most(double x, double bound,
                                                           double otherwise) {
  return x <= bound ? 0 : otherwise;
}

// 1 / (1 + exp(-z))
SYNCBN_HOST_DEVICE SYNCBN_INLINE float sigmoid(float z) { return 1 / (1 + std::exp(-z)); }
SYNCBN_HOST_DEVICE SYNCBN_INLINE double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

struct NoActivation {
  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V value(const V& z) const {
    return z;
  }
};

// max(z, 0), but NaN where z is NaN.
template <typename A>
struct Relu {
  static constexpr bool kIsLong = false;

  A largest_zero;  // of the tensor's dtype

  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V value(const V& z) const {
    return zero_where_at_most(z, largest_zero, z);
  }
  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V gradient(const V& dy, const V& z) const {
    return zero_where_at_most(z, largest_zero, dy);
  }
};

// z > 0 ? z : z * negative_slope
template <typename A>
struct LeakyRelu {
  static constexpr bool kIsLong = false;

  A largest_zero;  // of the tensor's dtype
  A negative_slope;

  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V value(const V& z) const {
    return where_greater(z, largest_zero, z, z * negative_slope);
  }
  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V gradient(const V& dy, const V& z) const {
    return where_greater(z, largest_zero, dy, dy * negative_slope);
  }
};

// z * sigmoid(z). Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units" (2018).
struct Silu {
  static constexpr bool kIsLong = true;  // so many instructions that loops should not be unrolled

  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V value(const V& z) const {
    return z * sigmoid(z);
  }
  // sigmoid(z) * (1 + z * (1 - sigmoid(z)))
  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V gradient(const V& dy, const V& z) const {
    const V s = sigmoid(z);
    return dy * (s + s * (z - z * s));
  }
};

// Calls function(activation of values of type A) with the activation for tensors of the dtype.
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

}  // namespace syncbn
