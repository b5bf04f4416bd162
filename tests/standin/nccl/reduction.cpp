// The arithmetic of collectives. Half precision is added up in float, in the order of ranks.
#include "reduction.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "call.h"
#include "failure.h"

namespace standin {
namespace {

class Bfloat16 {
 public:
  Bfloat16() = default;
  explicit Bfloat16(float value) {
    uint32_t all;
    std::memcpy(&all, &value, sizeof(all));
    const uint32_t to_even = 0x7fff + (all >> 16 & 1);
    bits_ = std::isnan(value) ? 0x7fff : static_cast<uint16_t>((all + to_even) >> 16);
  }
  explicit operator float() const {
    const uint32_t all = uint32_t{bits_} << 16;
    float value;
    std::memcpy(&value, &all, sizeof(value));
    return value;
  }

 private:
  uint16_t bits_ = 0;
};

template <ncclRedOp_t op, typename T>
T combine(T left, T right) {
  if constexpr (std::is_floating_point_v<T>) {  // a NaN loses against a number
    return op == ncclMax    ? std::fmax(left, right)
           : op == ncclMin  ? std::fmin(left, right)
           : op == ncclProd ? left * right
                            : left + right;
  } else if constexpr (op == ncclMax) {
    return std::max(left, right);
  } else if constexpr (op == ncclMin) {
    return std::min(left, right);
  } else {
    using Unsigned = std::make_unsigned_t<T>;  // wraps around
    const uint64_t one = static_cast<Unsigned>(left);
    const uint64_t other = static_cast<Unsigned>(right);
    return static_cast<T>(op == ncclProd ? one * other : one + other);
  }
}

// Values of type T are added as values of type Wide.
template <typename T, typename Wide>
struct Arithmetic {
  static void reduce(const std::vector<const void*>& parts, void* to, size_t count,
                     ncclRedOp_t op) {
    switch (op) {
      case ncclProd:
        return reduce_by<ncclProd>(parts, to, count);
      case ncclMax:
        return reduce_by<ncclMax>(parts, to, count);
      case ncclMin:
        return reduce_by<ncclMin>(parts, to, count);
      case ncclAvg:
        return reduce_by<ncclAvg>(parts, to, count);
      default:
        return reduce_by<ncclSum>(parts, to, count);
    }
  }

  static void multiply(const void* from, void* to, size_t count, double factor) {
    for (size_t i = 0; i < count; ++i) {
      const Wide value = static_cast<Wide>(static_cast<const T*>(from)[i]);
      static_cast<T*>(to)[i] = static_cast<T>(static_cast<Wide>(value * static_cast<Wide>(factor)));
    }
  }

  static double as_double(const void* value) {
    return static_cast<double>(static_cast<Wide>(*static_cast<const T*>(value)));
  }

 private:
  template <ncclRedOp_t op>
  static void reduce_by(const std::vector<const void*>& parts, void* to, size_t count) {
    const size_t size = parts.size();
    const auto* const* const values = reinterpret_cast<const T* const*>(parts.data());
    for (size_t i = 0; i < count; ++i) {
      Wide sum = static_cast<Wide>(values[0][i]);
      for (size_t rank = 1; rank < size; ++rank) {
        sum = combine<op>(sum, static_cast<Wide>(values[rank][i]));
      }
      if constexpr (op == ncclAvg) {
        sum = static_cast<Wide>(sum / static_cast<Wide>(size));
      }
      static_cast<T*>(to)[i] = static_cast<T>(sum);
    }
  }
};

template <typename Function>
auto with_arithmetic(ncclDataType_t type, const Function& function) {
  switch (type) {
    case ncclInt8:
      return function(Arithmetic<int8_t, int8_t>());
    case ncclUint8:
      return function(Arithmetic<uint8_t, uint8_t>());
    case ncclInt32:
      return function(Arithmetic<int32_t, int32_t>());
    case ncclUint32:
      return function(Arithmetic<uint32_t, uint32_t>());
    case ncclInt64:
      return function(Arithmetic<int64_t, int64_t>());
    case ncclUint64:
      return function(Arithmetic<uint64_t, uint64_t>());
    case ncclFloat16:
      return function(Arithmetic<_Float16, float>());
    case ncclBfloat16:
      return function(Arithmetic<Bfloat16, float>());
    case ncclFloat32:
      return function(Arithmetic<float, float>());
    case ncclFloat64:
      return function(Arithmetic<double, double>());
    default:
      size_of(type);  // there is such a type
      throw Failure(ncclInvalidArgument, "reductions of float8 are not implemented");
  }
}

double read_factor(const void* scalar, ncclDataType_t type) {
  return with_arithmetic(type, [&](auto arithmetic) { return arithmetic.as_double(scalar); });
}

}  // namespace

Reductions& Reductions::instance() {
  static auto* const value = new Reductions;
  return *value;
}

ncclRedOp_t Reductions::add(const void* scalar, ncclDataType_t type,
                            ncclScalarResidence_t residence) {
  Reduction made;
  made.has_factor = true;
  made.factor_type = type;
  if (residence == ncclScalarDevice) {
    made.factor_of_device = scalar;
  } else {
    made.factor = read_factor(scalar, type);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  made_[next_] = made;
  return static_cast<ncclRedOp_t>(next_++);
}

void Reductions::remove(ncclRedOp_t op) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (made_.erase(op) == 0) {
    throw Failure(ncclInvalidArgument, "there is no operation " + std::to_string(op));
  }
}

Reduction Reductions::find(ncclRedOp_t op, ncclDataType_t type) {
  with_arithmetic(type, [](auto) {});
  Reduction reduction;
  reduction.op = op;
  if (op >= 0 && op < ncclNumOps) {
    return reduction;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = made_.find(op);
  if (found == made_.end()) {
    throw Failure(ncclInvalidArgument, "there is no operation " + std::to_string(op));
  }
  if (found->second.factor_type != type) {
    throw Failure(ncclInvalidArgument, "a premulsum was made for another data type");
  }
  return found->second;
}

void copy_multiplied(const void* from, void* to, size_t count, ncclDataType_t type,
                     const Reduction& reduction) {
  if (!reduction.has_factor) {
    std::memcpy(to, from, count * size_of(type));
    return;
  }
  const double factor = reduction.factor_of_device == nullptr
                            ? reduction.factor
                            : read_factor(reduction.factor_of_device, type);
  with_arithmetic(type, [&](auto arithmetic) { arithmetic.multiply(from, to, count, factor); });
}

void reduce(const std::vector<const void*>& parts, void* to, size_t count, ncclDataType_t type,
            const Reduction& reduction) {
  with_arithmetic(type, [&](auto arithmetic) {
    arithmetic.reduce(parts, to, count, reduction.has_factor ? ncclSum : reduction.op);
  });
}

}  // namespace standin
