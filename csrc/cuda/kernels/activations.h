// The activations that kernels are instantiated for. Activations that are linear on each side of
// zero are one type with a flag: fewer kernels. Memory is slower than the few more instructions.
#pragma once

#include "../../common/activations.h"
#include "device.h"

namespace syncbn::cuda {

// ReLU, leaky ReLU and, with a slope of 1, the identity.
template <typename A>
struct PiecewiseLinear {
  static constexpr bool kIsLong = false;
  static constexpr bool kFromOutput = true;

  A largest_zero;
  A negative_slope;
  // gradient() replaces z by fmax(z, least), which is `least` if z is NaN. With -infinity the
  // gradient at NaN is dy times the slope, as in torch's leaky ReLU; with NaN it is dy, as in
  // torch's ReLU.
  A least;
  bool is_relu;

  __device__ __forceinline__ A value(A z) const { return choose(z, z); }
  __device__ __forceinline__ A gradient(A dy, A z) const { return choose(std::fmax(z, least), dy); }

 private:
  __device__ __forceinline__ A choose(A z, A factor) const {
    const A below = is_relu ? 0 : factor * negative_slope;
    return z <= largest_zero ? below : factor;
  }
};

template <typename A>
PiecewiseLinear<A> make_piecewise_linear(const ActivationChoice& choice, DType dtype) {
  const bool is_leaky = choice.kind == Activation::kLeakyRelu;
  const bool is_relu = choice.kind == Activation::kRelu;
  return {static_cast<A>(largest_zero(dtype)), static_cast<A>(is_leaky ? choice.negative_slope : 1),
          static_cast<A>(is_relu ? NAN : -INFINITY), is_relu};
}

// In a third fewer instructions. The relative error grows with |z| to about 1e-5, which the
// rounding to 16 bits hides.
struct ApproximateSigmoid {
  __device__ __forceinline__ float operator()(float z) const {
#if defined(__CUDA_ARCH__)
    return __fdividef(1, 1 + __expf(-z));
#else
    return sigmoid(z);
#endif
  }
};

template <typename T>
using SiluFor = std::conditional_t<sizeof(T) == 2, SiluOf<ApproximateSigmoid>, Silu>;

// Calls function(activation): the activation is for tensors of T.
template <typename T, typename Function>
void dispatch_activation(const ActivationChoice& choice, DType dtype, const Function& function) {
  if (choice.kind == Activation::kSilu) {
    function(SiluFor<T>{});
  } else {
    function(make_piecewise_linear<compute_t<T>>(choice, dtype));
  }
}

// A thread should have `loads` loads in flight. Returns its number of steps in flight; a step loads
// every input once. An exponential in float64 has so many instructions that two steps are enough;
// unrolled further, such kernels would be half of the library. Other exponentials and float64 need
// registers: with all loads, sm_100 and sm_120 spill if they are built from their own PTX.
template <typename Formula, typename A>
SYNCBN_HOST_DEVICE constexpr int steps_in_flight(int loads) {
  constexpr bool kInDouble = sizeof(A) == sizeof(double);
  if (Formula::kIsLong && kInDouble) {
    return 2;
  }
  return (Formula::kIsLong || kInDouble ? 3 * loads / 4 : loads) / Formula::kInputs;
}

}  // namespace syncbn::cuda
