// A rank's call of NCCL. Ranks show each other their calls, which must be alike.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace standin {

enum class Kind : int32_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kReceive,
  kExchange,  // sends and receives of one group
  kSplit,
};

// It lies in shared memory, so it holds no pointers.
struct Call {
  Kind kind;
  ncclDataType_t type = ncclInt8;
  size_t count = 0;
  int32_t op = -1;    // none
  int32_t rank = -1;  // the root, or the peer of a send or of a receive
};

const char* name_of(Kind kind);
bool is_alike(const Call& left, const Call& right);

// For example "reduce of 5 float32 values (sum) to rank 1".
std::string describe(const Call& call);

// Throws a Failure if there is no such type.
size_t size_of(ncclDataType_t type);

inline size_t bytes_of(const Call& call) { return call.count * size_of(call.type); }

}  // namespace standin
