// The dtypes of inputs: their sizes, their ranges, and their types for computation.
#pragma once

#include <cfloat>
#include <type_traits>

#include "host_device.h"

namespace syncbn {

// DTYPES in tests/support/emulated.py has the same order.
enum class DType { kHalf, kBFloat16, kFloat, kDouble };

constexpr int size_of(DType dtype) {
  return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
}

SYNCBN_HOST_DEVICE constexpr double largest_finite(DType dtype) {
  switch (dtype) {
    case DType::kHalf:
      return 65504;
    case DType::kBFloat16:
      return 3.38953139e38;
    case DType::kFloat:
      return FLT_MAX;
    case DType::kDouble:
      break;
  }
  return DBL_MAX;
}

// The largest number that rounds to zero in the dtype; zero for float32 and float64, which values
// are computed in.
SYNCBN_HOST_DEVICE constexpr double largest_zero(DType dtype) {
  switch (dtype) {
    case DType::kHalf:
      return 0x1p-25;
    case DType::kBFloat16:
      return 0x1p-134;
    case DType::kFloat:
    case DType::kDouble:
      break;
  }
  return 0;
}

// The type for computing with values of T, the host's or CUDA's type of a dtype.
template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A type as an argument of a function.
template <typename T>
struct TypeTag {
  using type = T;
};

}  // namespace syncbn
