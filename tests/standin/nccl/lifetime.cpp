// How communicators begin and end.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>
#include <thread>
#include <vector>

#include "handles.h"
#include "standin.h"

namespace standin {
namespace {

std::string new_name() {
  std::random_device random;
  char name[NCCL_UNIQUE_ID_BYTES];
  std::snprintf(name, sizeof(name), "/standin-nccl-%d-%08x%08x", getpid(), random(), random());
  return name;
}

void init_all(ncclComm_t* handles, int size, const int* devices) {
  const std::string name = new_name();
  std::vector<std::exception_ptr> errors(std::max(size, 0));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([=, &errors] {
      try {
        cudaSetDevice(devices == nullptr ? rank : devices[rank]);
        handles[rank] = join(name, size, rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
  }
}

// Waits for enqueued work, which ends by itself after a failure.
void flush(Communicator& communicator) {
  if (communicator.error() == ncclSuccess) {
    communicator.order().synchronize();
  }
}

}  // namespace
}  // namespace standin

using standin::guarded;

STANDIN_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  const std::string name = standin::new_name();
  std::memcpy(id->internal, name.c_str(), name.size());
  return ncclSuccess;
}

STANDIN_API ncclResult_t ncclCommInitRank(ncclComm_t* result, int size, ncclUniqueId id, int rank) {
  return guarded([&] { *result = standin::join(id.internal, size, rank); });
}

STANDIN_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int size, ncclUniqueId id,
                                                int rank, ncclConfig_t*) {
  return ncclCommInitRank(result, size, id, rank);
}

STANDIN_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* result, int size, int rank, int,
                                                  ncclUniqueId* ids, ncclConfig_t*) {
  return ncclCommInitRank(result, size, ids[0], rank);
}

STANDIN_API ncclResult_t ncclCommInitAll(ncclComm_t* results, int size, const int* devices) {
  return guarded([&] { standin::init_all(results, size, devices); });
}

STANDIN_API ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  return guarded([&] { standin::flush(*standin::find_handle(communicator)); });
}

// Graphs keep what they need of the communicator.
STANDIN_API ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  return guarded([&] { standin::flush(*standin::remove_handle(communicator)); });
}

STANDIN_API ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  return guarded([&] { standin::remove_handle(communicator)->abort(); });
}
