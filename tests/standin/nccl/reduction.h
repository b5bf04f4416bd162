// Sums and the like, in the order of ranks.
#pragma once

#include <nccl.h>

#include <map>
#include <mutex>
#include <vector>

namespace standin {

// An operation as its caller knows it when the collective is enqueued.
struct Reduction {
  ncclRedOp_t op = ncclSum;
  bool has_factor = false;
  double factor = 1;
  const void* factor_of_device = nullptr;  // to be read when the collective runs
  ncclDataType_t factor_type = ncclFloat32;

  // The number that ranks compare: factors may differ.
  int number() const { return has_factor ? ncclNumOps : op; }
};

// Operations made by callers, of all communicators.
class Reductions {
 public:
  static Reductions& instance();

  ncclRedOp_t add(const void* scalar, ncclDataType_t type, ncclScalarResidence_t residence);
  void remove(ncclRedOp_t op);
  // Throws a Failure for an operation that does not exist, or that this type does not support.
  Reduction find(ncclRedOp_t op, ncclDataType_t type);

 private:
  std::mutex mutex_;
  std::map<int, Reduction> made_;
  int next_ = ncclNumOps;
};

// Copies a rank's values, multiplied by its factor.
void copy_multiplied(const void* from, void* to, size_t count, ncclDataType_t type,
                     const Reduction& reduction);

// `parts` are the ranks' values.
void reduce(const std::vector<const void*>& parts, void* to, size_t count, ncclDataType_t type,
            const Reduction& reduction);

}  // namespace standin
