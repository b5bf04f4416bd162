// A rank's call of NCCL. Ranks show each other their calls, which must be alike.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace standin {

enum class Kind : int32_t { kAllReduce, kBroadcast, kAllGather };

// It lies in shared memory, so it holds no pointers.
struct Call {
  Kind kind;
  ncclDataType_t type;
  size_t count;
  ncclRedOp_t op = ncclSum;  // of an all_reduce
  int32_t root = 0;          // of a broadcast
};

const char* name_of(Kind kind);
// These throw a Failure if there is no such type or operation.
const char* name_of(ncclDataType_t type);
const char* name_of(ncclRedOp_t op);
size_t size_of(ncclDataType_t type);

bool is_alike(const Call& left, const Call& right);

// For example "broadcast of 5 float32 values from rank 1".
std::string describe(const Call& call);

inline size_t bytes_of(const Call& call) { return call.count * size_of(call.type); }

}  // namespace standin
