// The C++ type of a dtype that is known at run time.
#pragma once

#include "../common/scalar_type.h"

namespace syncbn::cpu {

// Calls function(TypeTag<T>{}).
template <typename Function>
void dispatch_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kHalf:
      return function(TypeTag<Half>{});
    case DType::kBFloat16:
      return function(TypeTag<BFloat16>{});
    case DType::kFloat:
      return function(TypeTag<float>{});
    case DType::kDouble:
      return function(TypeTag<double>{});
  }
}

template <typename Function>
void dispatch_dtype(ScalarType dtype, const Function& function) {
  dispatch_dtype(to_dtype(dtype), function);
}

}  // namespace syncbn::cpu
