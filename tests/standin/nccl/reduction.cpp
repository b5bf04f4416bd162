// The arithmetic of collectives: the operations and types that syncbn and torch's DDP use.
#include "reduction.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "call.h"
#include "failure.h"

namespace standin {
namespace {

template <ncclRedOp_t op, typename T>
T combine(T left, T right) {
  if constexpr (std::is_floating_point_v<T>) {
    return op == ncclMax ? std::fmax(left, right) : left + right;  // a NaN loses against a number
  } else if constexpr (op == ncclMax) {
    return std::max(left, right);
  } else {
    using Unsigned = std::make_unsigned_t<T>;  // wraps around
    return static_cast<T>(static_cast<Unsigned>(left) + static_cast<Unsigned>(right));
  }
}

template <ncclRedOp_t op, typename T>
void reduce(const std::vector<const void*>& parts, void* to, size_t count) {
  const auto* const* const values = reinterpret_cast<const T* const*>(parts.data());
  for (size_t i = 0; i < count; ++i) {
    T result = values[0][i];
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      result = combine<op>(result, values[rank][i]);
    }
    static_cast<T*>(to)[i] = result;
  }
}

template <ncclRedOp_t op>
Reduction find_for_type(ncclDataType_t type) {
  switch (type) {
    case ncclUint8:
      return reduce<op, uint8_t>;
    case ncclInt32:
      return reduce<op, int32_t>;
    case ncclInt64:
      return reduce<op, int64_t>;
    case ncclFloat32:
      return reduce<op, float>;
    case ncclFloat64:
      return reduce<op, double>;
    default:
      throw Failure(ncclInvalidArgument,
                    std::string("all_reduce of ") + name_of(type) + " is not implemented");
  }
}

}  // namespace

Reduction find_reduction(ncclRedOp_t op, ncclDataType_t type) {
  switch (op) {
    case ncclSum:
      return find_for_type<ncclSum>(type);
    case ncclMax:
      return find_for_type<ncclMax>(type);
    default:
      throw Failure(ncclInvalidArgument,
                    std::string("all_reduce by ") + name_of(op) + " is not implemented");
  }
}

}  // namespace standin
