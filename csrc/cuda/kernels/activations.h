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

// Calls function(activation): the activation computes in A, for tensors of the dtype.
template <typename A, typename Function>
void dispatch_activation(const ActivationChoice& choice, DType dtype, const Function& function) {
  if (choice.kind == Activation::kSilu) {
    function(Silu{});
  } else {
    function(make_piecewise_linear<A>(choice, dtype));
  }
}

// A thread should have `loads` loads in flight. Returns its number of steps in flight; a step loads
// every input once. An exponential in float64 has so many instructions that two steps are enough;
// unrolled further, such kernels would be half of the library. Other exponentials and float64 need
// registers: with all loads, sm_100 and sm_120 spill if they are built from their own PTX.
template <typename Formula, typename A>
__device__ constexpr int steps_in_flight(int loads) {
  constexpr bool kInDouble = sizeof(A) == sizeof(double);
  if (Formula::kIsLong && kInDouble) {
    return 2;
  }
  return (Formula::kIsLong || kInDouble ? 3 * loads / 4 : loads) / Formula::kInputs;
}

}  // namespace syncbn::cuda
