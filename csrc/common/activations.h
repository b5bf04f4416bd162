// The activations that may follow a batch norm, and their derivatives; ReLU and leaky ReLU are in
// csrc/cpu/activations.h and csrc/cuda/kernels/activations.h. Includes no torch header: CUDA
// kernels and the CPU operators share it.
//
// An activation is a struct with value(z) and gradient(dy, z), which is dy times the derivative at
// z. Both take z as it was computed, but treat as zero what the tensor's dtype would: a positive z
// that rounds to zero there has the derivative of zero.
#pragma once

#include <cmath>

#include "dtype.h"

namespace syncbn {

// The numbers are those of the schemas, and of NUMBERS in syncbn/ops/epilogue.py.
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

// 1 / (1 + exp(-z))
SYNCBN_HOST_DEVICE SYNCBN_INLINE float sigmoid(float z) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1, 1 + expf(-z));  // two ulp; 0 where the quotient is subnormal
#else
  return 1 / (1 + std::exp(-z));
#endif
}
SYNCBN_HOST_DEVICE SYNCBN_INLINE double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

// Without a gradient: none goes through it. It also stands in formulas of double, which only hold
// constants.
struct NoActivation {
  static constexpr bool kIsLong = false;

  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V value(const V& z) const {
    return z;
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

}  // namespace syncbn
