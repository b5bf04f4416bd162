// The activations of the epilogue and their derivatives. CUDA kernels and CPU operators share this
// file, except for ReLU and leaky ReLU: csrc/cpu/activations.h, csrc/cuda/kernels/activations.h.
//
// An activation is a struct with value(z) and gradient(dy, z) = dy * derivative(z). Both take the
// unrounded z. A positive z that rounds to zero in the tensor's dtype counts as zero. kFromOutput:
// the derivative follows from the sign of the output.
#pragma once

#include <cmath>

#include "dtype.h"

namespace syncbn {

// The schemas (csrc/ops.cpp) and NUMBERS in syncbn/ops/epilogue.py have the same numbers.
enum class Activation { kNone = 0, kRelu = 1, kLeakyRelu = 2, kSilu = 3 };
constexpr int kNumActivations = 4;

struct ActivationChoice {
  Activation kind = Activation::kNone;
  double negative_slope = 0;

  bool is_from_output() const {
    return kind == Activation::kRelu || kind == Activation::kLeakyRelu;
  }
};

// x * y + z, rounded once (on the CPU: if the instruction set can). Forward and backward passes
// need the same z. Packs (csrc/cpu/pack.h) have an overload.
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

// The identity. No gradient is computed through it. Formulas of double, which only hold constants,
// have it as their activation, too.
struct NoActivation {
  static constexpr bool kIsLong = false;
  static constexpr bool kFromOutput = false;

  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V value(const V& z) const {
    return z;
  }
};

struct Sigmoid {
  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V operator()(const V& z) const {
    return sigmoid(z);
  }
};

// z * sigmoid(z). Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units" (2018).
template <typename Function>
struct SiluOf {
  static constexpr bool kIsLong = true;  // too many instructions to unroll a loop
  static constexpr bool kFromOutput = false;

  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V value(const V& z) const {
    return z * Function()(z);
  }
  // sigmoid(z) * (1 + z * (1 - sigmoid(z)))
  template <typename V>
  SYNCBN_HOST_DEVICE SYNCBN_INLINE V gradient(const V& dy, const V& z) const {
    const V s = Function()(z);
    return dy * (s + s * (z - z * s));
  }
};
using Silu = SiluOf<Sigmoid>;

}  // namespace syncbn
