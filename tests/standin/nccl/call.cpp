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

constexpr const char* kOperations[] = {"sum", "prod", "max", "min", "avg"};
static_assert(sizeof(kOperations) / sizeof(kOperations[0]) == ncclNumOps, "as for types");

constexpr const char* kKinds[] = {"all_reduce", "broadcast", "all_gather"};

const Type& find_type(ncclDataType_t type) {
  if (type < 0 || type >= ncclNumTypes) {
    throw Failure(ncclInvalidArgument, "there is no data type " + std::to_string(type));
  }
  return kTypes[type];
}

}  // namespace

const char* name_of(Kind kind) { return kKinds[static_cast<int>(kind)]; }
const char* name_of(ncclDataType_t type) { return find_type(type).name; }

const char* name_of(ncclRedOp_t op) {
  if (op < 0 || op >= ncclNumOps) {
    throw Failure(ncclInvalidArgument, "there is no operation " + std::to_string(op));
  }
  return kOperations[op];
}

bool is_alike(const Call& left, const Call& right) {
  return left.kind == right.kind && left.type == right.type && left.count == right.count &&
         left.op == right.op && left.root == right.root;
}

std::string describe(const Call& call) {
  std::string words = std::string(name_of(call.kind)) + " of " + std::to_string(call.count) + " " +
                      name_of(call.type) + (call.count == 1 ? " value" : " values");
  if (call.kind == Kind::kAllReduce) {
    words += std::string(" (") + name_of(call.op) + ")";
  }
  if (call.kind == Kind::kBroadcast) {
    words += " from rank " + std::to_string(call.root);
  }
  return words;
}

size_t size_of(ncclDataType_t type) { return find_type(type).size; }

}  // namespace standin
