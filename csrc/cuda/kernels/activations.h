// The activations that kernels are instantiated for. Those of common/activations.h that are linear
// on either side of zero are one here, told apart by a flag: fewer kernels, and memory is slower
// than their few more instructions.
#pragma once

#include "../../common/activations.h"
#include "device.h"

namespace syncbn::cuda {

// ReLU, leaky ReLU, and with a slope of 1 no activation at all.
template <typename A>
struct PiecewiseLinear {
  static constexpr bool kIsLong = false;

  A largest_zero;
  A negative_slope;
  // fmax returns its other argument where one is NaN. With -infinity a NaN takes the slope, as
  // leaky ReLU has it; with NaN it stays NaN, which lets the gradient through, as ReLU has it.
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

// Calls function(activation of values of type A) with the activation for tensors of the dtype.
template <typename A, typename Function>
void dispatch_activation(const ActivationChoice& choice, DType dtype, const Function& function) {
  if (choice.kind == Activation::kSilu) {
    function(Silu{});
  } else {
    function(make_piecewise_linear<A>(choice, dtype));
  }
}

// Steps that a thread has in flight, each with a load of every input, where so many loads are
// wanted. Exponentials of float64 are so many instructions that two steps are enough, and unrolled
// they would be half of the library. Others and float64 need registers: with all loads sm_100 and
// sm_120 spill where they are built from PTX of their own.
template <typename Formula, typename A>
__device__ constexpr int steps_in_flight(int loads) {
  constexpr bool kInDouble = sizeof(A) == sizeof(double);
  if (Formula::kIsLong && kInDouble) {
    return 2;
  }
  return (Formula::kIsLong || kInDouble ? 3 * loads / 4 : loads) / Formula::kInputs;
}

}  // namespace syncbn::cuda
