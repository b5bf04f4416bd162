// From a dtype known at run time to a C++ type.
#pragma once

#include "../common/stable.h"

namespace syncbn::cpu {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls function(TypeTag<T>{}) for one of the four supported dtypes.
template <typename Function>
void dispatch_float(ScalarType dtype, const Function& function) {
  switch (dtype) {
    case ScalarType::Half:
      return function(TypeTag<Half>{});
    case ScalarType::BFloat16:
      return function(TypeTag<BFloat16>{});
    case ScalarType::Float:
      return function(TypeTag<float>{});
    case ScalarType::Double:
      return function(TypeTag<double>{});
    default:
      syncbn::detail::throw_error("syncbn: expected a floating-point dtype");
  }
}

}  // namespace syncbn::cpu
