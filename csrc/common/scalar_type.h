// Torch's dtypes: their names in messages, and the dtypes of inputs.
#pragma once

#include <cctype>
#include <string>

#include "dtype.h"
#include "stable.h"

namespace syncbn {

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:  // such as Bool, BFloat16 and Float8_e4m3fn
      std::string name = torch::headeronly::toString(dtype);
      for (char& letter : name) {
        letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
      }
      return name;
  }
}

inline bool is_real_number(ScalarType dtype) {
  return dtype != ScalarType::Bool && dtype != ScalarType::ComplexHalf &&
         dtype != ScalarType::ComplexFloat && dtype != ScalarType::ComplexDouble;
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
