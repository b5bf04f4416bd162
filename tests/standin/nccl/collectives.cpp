// The collectives: each defines a rank's writes into its slot, and its reads.
#include <cstring>

#include "collective.h"
#include "reduction.h"

namespace standin {
namespace {

// Gives a rank's values to the others.
Write write_from(const void* send) {
  return [=](unsigned char* slot, size_t offset, size_t length) {
    std::memcpy(slot, at(send, offset), length);
  };
}

void all_reduce(const void* send, void* receive, const Call& call, ncclComm_t handle,
                cudaStream_t stream) {
  const Reduction reduce = find_reduction(call.op, call.type);
  const Collective collective(call, handle, stream);
  collective.check_input(send);
  collective.add(receive, 1, [=](Communicator& communicator) {
    const auto read = [=, size = communicator.size()](const Slots& slots, size_t offset,
                                                      size_t length) {
      std::vector<const void*> parts;
      for (int rank = 0; rank < size; ++rank) {
        parts.push_back(slots.of(rank));
      }
      reduce(parts, at(receive, offset), length / size_of(call.type));
    };
    exchange(communicator, call, write_from(send), read);
  });
}

void broadcast(const void* send, void* receive, const Call& call, ncclComm_t handle,
               cudaStream_t stream) {
  const Collective collective(call, handle, stream);
  const bool is_root = collective.is_root();
  if (is_root) {
    collective.check_input(send);
  }
  collective.add(receive, 1, [=](Communicator& communicator) {
    const auto read = [=](const Slots& slots, size_t offset, size_t length) {
      std::memcpy(at(receive, offset), slots.of(call.root), length);
    };
    exchange(communicator, call, is_root ? write_from(send) : Write(),
             is_root && send == receive ? Read() : read);
  });
}

void all_gather(const void* send, void* receive, const Call& call, ncclComm_t handle,
                cudaStream_t stream) {
  const Collective collective(call, handle, stream);
  collective.check_input(send);
  collective.add(receive, collective.size(), [=](Communicator& communicator) {
    const auto read = [=, size = communicator.size()](const Slots& slots, size_t offset,
                                                      size_t length) {
      for (int rank = 0; rank < size; ++rank) {
        std::memcpy(at(receive, rank * bytes_of(call) + offset), slots.of(rank), length);
      }
    };
    exchange(communicator, call, write_from(send), read);
  });
}

}  // namespace
}  // namespace standin

using standin::guarded;
using standin::Kind;

STANDIN_API ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count,
                                       ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                                       cudaStream_t stream) {
  return guarded([&] {
    standin::all_reduce(send, receive, {Kind::kAllReduce, type, count, op}, communicator, stream);
  });
}

STANDIN_API ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count,
                                       ncclDataType_t type, int root, ncclComm_t communicator,
                                       cudaStream_t stream) {
  return guarded([&] {
    standin::broadcast(send, receive, {Kind::kBroadcast, type, count, ncclSum, root}, communicator,
                       stream);
  });
}

STANDIN_API ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root,
                                   ncclComm_t communicator, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, communicator, stream);
}

STANDIN_API ncclResult_t ncclAllGather(const void* send, void* receive, size_t count,
                                       ncclDataType_t type, ncclComm_t communicator,
                                       cudaStream_t stream) {
  return guarded([&] {
    standin::all_gather(send, receive, {Kind::kAllGather, type, count}, communicator, stream);
  });
}
