// Names of calls, and names and sizes of data types.
#include "call.h"

#include "failure.h"

namespace standin {
namespace {

struct Type {
  const char* name;
  size_t size;
};

// In the order of ncclDataType_t.
constexpr Type kTypes[] = {{"int8", 1},    {"uint8", 1},    {"int32", 4},       {"uint32", 4},
                           {"int64", 8},   {"uint64", 8},   {"float16", 2},     {"float32", 4},
                           {"float64", 8}, {"bfloat16", 2}, {"float8_e4m3", 1}, {"float8_e5m2", 1}};
static_assert(sizeof(kTypes) / sizeof(kTypes[0]) == ncclNumTypes, "a type for each of NCCL's");

constexpr const char* kOperations[] = {"sum", "prod", "max", "min", "avg", "premulsum"};

constexpr const char* kKinds[] = {"all_reduce",     "reduce",     "broadcast", "all_gather",
                                  "reduce_scatter", "all_to_all", "gather",    "scatter",
                                  "send",           "recv",       "send_recv", "split"};

const Type& find_type(ncclDataType_t type) {
  if (type < 0 || type >= ncclNumTypes) {
    throw Failure(ncclInvalidArgument, "there is no data type " + std::to_string(type));
  }
  return kTypes[type];
}

const char* preposition(Kind kind) {
  switch (kind) {
    case Kind::kBroadcast:
    case Kind::kScatter:
    case Kind::kReceive:
      return " from rank ";
    default:
      return " to rank ";
  }
}

}  // namespace

const char* name_of(Kind kind) { return kKinds[static_cast<int>(kind)]; }

bool is_alike(const Call& left, const Call& right) {
  return left.kind == right.kind && left.type == right.type && left.count == right.count &&
         left.op == right.op && left.rank == right.rank;
}

std::string describe(const Call& call) {
  if (call.kind == Kind::kSplit || call.kind == Kind::kExchange) {
    return name_of(call.kind);
  }
  std::string words = std::string(name_of(call.kind)) + " of " + std::to_string(call.count) + " " +
                      find_type(call.type).name + (call.count == 1 ? " value" : " values");
  if (call.op >= 0) {
    words += std::string(" (") + kOperations[call.op] + ")";
  }
  if (call.rank >= 0) {
    words += preposition(call.kind) + std::to_string(call.rank);
  }
  return words;
}

size_t size_of(ncclDataType_t type) { return find_type(type).size; }

}  // namespace standin
