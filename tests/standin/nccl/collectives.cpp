// Collectives that only move values: each defines a rank's writes into its slot, and its reads.
#include <cstring>

#include "collective.h"

namespace standin {
namespace {

void broadcast(const void* send, void* receive, const Call& call, ncclComm_t handle,
               cudaStream_t stream) {
  const Collective collective(call, handle, stream);
  const bool is_root = collective.is_root();
  if (is_root) {
    collective.check_input(send, 1);
  }
  const size_t bytes = bytes_of(call);
  collective.add(receive, 1, [=](Communicator& communicator) {
    Exchange steps;
    if (is_root) {
      steps.write = [=](unsigned char* slot, size_t offset, size_t length) {
        std::memcpy(slot, at(send, offset), length);
      };
    }
    if (!is_root || send != receive) {
      steps.read = [=](const Slots& slots, size_t offset, size_t length) {
        std::memcpy(at(receive, offset), slots.of(call.rank), length);
      };
    }
    exchange(communicator, call, bytes, 1, steps);
  });
}

void all_gather(const void* send, void* receive, const Call& call, ncclComm_t handle,
                cudaStream_t stream) {
  const Collective collective(call, handle, stream);
  collective.check_input(send, 1);
  const size_t bytes = bytes_of(call);
  collective.add(receive, collective.size(), [=](Communicator& communicator) {
    Exchange steps;
    steps.write = [=](unsigned char* slot, size_t offset, size_t length) {
      std::memcpy(slot, at(send, offset), length);
    };
    steps.read = [=, size = communicator.size()](const Slots& slots, size_t offset, size_t length) {
      for (int rank = 0; rank < size; ++rank) {
        std::memcpy(at(receive, rank * bytes + offset), slots.of(rank), length);
      }
    };
    exchange(communicator, call, bytes, 1, steps);
  });
}

void gather(const void* send, void* receive, const Call& call, ncclComm_t handle,
            cudaStream_t stream) {
  const Collective collective(call, handle, stream);
  const bool is_root = collective.is_root();
  collective.check_input(send, 1);
  const size_t bytes = bytes_of(call);
  collective.add(receive, is_root ? collective.size() : 0, [=](Communicator& communicator) {
    Exchange steps;
    steps.write = [=](unsigned char* slot, size_t offset, size_t length) {
      std::memcpy(slot, at(send, offset), length);
    };
    if (is_root) {
      steps.read = [=, size = communicator.size()](const Slots& slots, size_t offset,
                                                   size_t length) {
        for (int rank = 0; rank < size; ++rank) {
          std::memcpy(at(receive, rank * bytes + offset), slots.of(rank), length);
        }
      };
    }
    exchange(communicator, call, bytes, 1, steps);
  });
}

// A slot has a part for each receiver.
Exchange scatter_steps(const Communicator& communicator, const void* send, size_t bytes) {
  const int size = communicator.size();
  const size_t distance = part_bytes(communicator, size);
  Exchange steps;
  steps.write = [=](unsigned char* slot, size_t offset, size_t length) {
    for (int rank = 0; rank < size; ++rank) {
      std::memcpy(slot + rank * distance, at(send, rank * bytes + offset), length);
    }
  };
  return steps;
}

void scatter(const void* send, void* receive, const Call& call, ncclComm_t handle,
             cudaStream_t stream) {
  const Collective collective(call, handle, stream);
  const bool is_root = collective.is_root();
  if (is_root) {
    collective.check_input(send, collective.size());
  }
  const size_t bytes = bytes_of(call);
  collective.add(receive, 1, [=](Communicator& communicator) {
    Exchange steps = is_root ? scatter_steps(communicator, send, bytes) : Exchange();
    const size_t mine = communicator.rank() * part_bytes(communicator, communicator.size());
    steps.read = [=](const Slots& slots, size_t offset, size_t length) {
      std::memcpy(at(receive, offset), slots.of(call.rank) + mine, length);
    };
    exchange(communicator, call, bytes, communicator.size(), steps);
  });
}

void all_to_all(const void* send, void* receive, const Call& call, ncclComm_t handle,
                cudaStream_t stream) {
  const Collective collective(call, handle, stream);
  collective.check_input(send, collective.size());
  const size_t bytes = bytes_of(call);
  collective.add(receive, collective.size(), [=](Communicator& communicator) {
    Exchange steps = scatter_steps(communicator, send, bytes);
    const int size = communicator.size();
    const size_t mine = communicator.rank() * part_bytes(communicator, size);
    steps.read = [=](const Slots& slots, size_t offset, size_t length) {
      for (int rank = 0; rank < size; ++rank) {
        std::memcpy(at(receive, rank * bytes + offset), slots.of(rank) + mine, length);
      }
    };
    exchange(communicator, call, bytes, size, steps);
  });
}

}  // namespace
}  // namespace standin

using standin::guarded;
using standin::Kind;

STANDIN_API ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count,
                                       ncclDataType_t type, int root, ncclComm_t communicator,
                                       cudaStream_t stream) {
  return guarded([&] {
    standin::broadcast(send, receive, {Kind::kBroadcast, type, count, -1, root}, communicator,
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

STANDIN_API ncclResult_t ncclGather(const void* send, void* receive, size_t count,
                                    ncclDataType_t type, int root, ncclComm_t communicator,
                                    cudaStream_t stream) {
  return guarded([&] {
    standin::gather(send, receive, {Kind::kGather, type, count, -1, root}, communicator, stream);
  });
}

STANDIN_API ncclResult_t ncclScatter(const void* send, void* receive, size_t count,
                                     ncclDataType_t type, int root, ncclComm_t communicator,
                                     cudaStream_t stream) {
  return guarded([&] {
    standin::scatter(send, receive, {Kind::kScatter, type, count, -1, root}, communicator, stream);
  });
}

STANDIN_API ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count,
                                      ncclDataType_t type, ncclComm_t communicator,
                                      cudaStream_t stream) {
  return guarded([&] {
    standin::all_to_all(send, receive, {Kind::kAllToAll, type, count}, communicator, stream);
  });
}
