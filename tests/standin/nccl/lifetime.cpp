// How communicators begin and end.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>

#include "handles.h"
#include "standin.h"

namespace standin {
namespace {

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
  std::random_device random;
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->internal, sizeof(id->internal), "/standin-nccl-%d-%08x%08x", getpid(), random(),
                random());
  return ncclSuccess;
}

STANDIN_API ncclResult_t ncclCommInitRank(ncclComm_t* result, int size, ncclUniqueId id, int rank) {
  return guarded([&] { *result = standin::join(id.internal, size, rank); });
}

STANDIN_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int size, ncclUniqueId id,
                                                int rank, ncclConfig_t*) {
  return ncclCommInitRank(result, size, id, rank);
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
