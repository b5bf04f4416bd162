// The sigmoid of vectors. Not every platform's C library has vector functions, and torch does not
// export its own.
#pragma once

#include <cstdint>

#include "../common/host_device.h"

namespace syncbn::cpu::detail {

template <typename A>
struct Exponential;

// The Taylor series of exp(r) up to kDegree has an error of less than a tenth of the type's
// rounding for |r| <= log(2) / 2. kLog2High has so few bits that its product with an exponent is
// exact. exp(x) is negligible beside 1 for x < kLeast and infinite for x > kMost.
template <>
struct Exponential<float> {
  static constexpr int kDegree = 7;
  static constexpr int kMantissa = 23;
  static constexpr float kLog2High = 0x1.62ep-1f;
  static constexpr float kLog2Low = 0x1.0bfbe8p-15f;
  static constexpr float kLeast = -87;
  static constexpr float kMost = 89;
};
template <>
struct Exponential<double> {
  static constexpr int kDegree = 13;
  static constexpr int kMantissa = 52;
  static constexpr double kLog2High = 0x1.62e42feep-1;
  static constexpr double kLog2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kLeast = -708;
  static constexpr double kMost = 710;
};

constexpr double kReciprocalFactorials[] = {1,
                                            1,
                                            1. / 2,
                                            1. / 6,
                                            1. / 24,
                                            1. / 120,
                                            1. / 720,
                                            1. / 5040,
                                            1. / 40320,
                                            1. / 362880,
                                            1. / 3628800,
                                            1. / 39916800,
                                            1. / 479001600,
                                            1. / 6227020800};

// exp(x) = exp(r) * 2^n, with n = round(x / log(2)) and r = x - n * log(2). The result is infinite
// if 2^n is: up to 40 % too early.
template <typename A, typename Vector>
SYNCBN_INLINE void exponential(const Vector& argument, Vector& result) {
  using E = Exponential<A>;
  using Integers = decltype(argument == argument);
  constexpr A kInverseLog2 = 1.4426950408889634;
  // A sum with this number is rounded to an integer, in its lowest bits.
  constexpr A kRounding = 3 * (int64_t{1} << (E::kMantissa - 1));
  constexpr int64_t kBias = (int64_t{1} << (8 * sizeof(A) - E::kMantissa - 2)) - 1;
  Vector x = argument < E::kLeast ? Vector{} + E::kLeast : argument;  // keeps NaN
  x = x > E::kMost ? Vector{} + E::kMost : x;
  const Vector rounded = x * kInverseLog2 + kRounding;
  const Vector n = rounded - kRounding;
  const Vector r = (x - n * E::kLog2High) - n * E::kLog2Low;
  Vector series = Vector{} + static_cast<A>(kReciprocalFactorials[E::kDegree]);
  for (int k = E::kDegree - 1; k >= 0; --k) {
    series = series * r + static_cast<A>(kReciprocalFactorials[k]);
  }
  const Integers power_of_two = ((Integers)rounded + kBias) << E::kMantissa;
  result = series * (Vector)power_of_two;
}

template <typename A, typename Vector>
SYNCBN_INLINE void sigmoid(const Vector& z, Vector& result) {
  Vector e;
  exponential<A>(Vector{} - z, e);
  result = 1 / (1 + e);
}

}  // namespace syncbn::cpu::detail
