// Torch's dtypes: their names in messages, and the dtypes of inputs.
#pragma once

#include "dtype.h"
#include "stable.h"

namespace syncbn {

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline bool is_supported_float(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
         dtype == ScalarType::Double;
}

inline DType to_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return DType::kHalf;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat;
    case ScalarType::Double:
      return DType::kDouble;
    default:
      detail::throw_error("syncbn: expected a floating-point dtype, but got ", dtype_name(dtype));
  }
}

}  // namespace syncbn
