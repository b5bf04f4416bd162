// Sums and the like, in the order of ranks.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace standin {

// `parts` are the ranks' values, `count` of each.
using Reduction = void (*)(const std::vector<const void*>& parts, void* to, size_t count);

// Throws a Failure for an operation or a type that does not exist, or is not implemented.
Reduction find_reduction(ncclRedOp_t op, ncclDataType_t type);

}  // namespace standin
