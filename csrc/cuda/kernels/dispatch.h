// From a plan to the instantiation of a kernel.
#pragma once

#include "device.h"
#include "plan.h"

namespace syncbn::cuda {

template <int kValue>
using IntTag = std::integral_constant<int, kValue>;

// Calls function(TypeTag<T>{}).
template <typename Function>
void dispatch_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kHalf:
      return function(TypeTag<__half>{});
    case DType::kBFloat16:
      return function(TypeTag<__nv_bfloat16>{});
    case DType::kFloat:
      return function(TypeTag<float>{});
    case DType::kDouble:
      return function(TypeTag<double>{});
  }
}

// Calls matrix(TypeTag<T>{}, vector width) or planar(TypeTag<T>{}, vector width, aligned).
template <typename MatrixFunction, typename PlanarFunction>
void dispatch_plan(const Plan& plan, const MatrixFunction& matrix, const PlanarFunction& planar) {
  dispatch_dtype(plan.dtype, [&](auto type) {
    constexpr int kSize = sizeof(typename decltype(type)::type);
    constexpr int kWidest = kVectorBytes / kSize;
    if (plan.is_matrix) {
      if (plan.vector == kWidest) {
        matrix(type, IntTag<kWidest>{});
      } else if (plan.vector == 1) {
        matrix(type, IntTag<1>{});
      } else if constexpr (kSize == 2) {
        matrix(type, IntTag<2>{});
      }
    } else if (plan.vector == 1) {
      planar(type, IntTag<1>{}, std::true_type{});
    } else if (plan.aligned) {
      planar(type, IntTag<kWidest>{}, std::true_type{});
    } else {
      planar(type, IntTag<kWidest>{}, std::false_type{});
    }
  });
}

}  // namespace syncbn::cuda
