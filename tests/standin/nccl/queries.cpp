// Queries, and registrations of memory, which have no effect.
#include "handles.h"
#include "standin.h"

using standin::find_handle;
using standin::guarded;

STANDIN_API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

STANDIN_API ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  return guarded([&] { *count = find_handle(communicator)->size(); });
}

STANDIN_API ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  return guarded([&] { *rank = find_handle(communicator)->rank(); });
}

STANDIN_API ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) {
  return guarded([&] { *error = find_handle(communicator)->error(); });
}

// The error of the process: torch passes no communicator.
STANDIN_API const char* ncclGetLastError(ncclComm_t) { return standin::last_words(); }

// NCCL's own messages: torch's callers know them.
STANDIN_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

// On a GPU registration only makes transfers faster.
STANDIN_API ncclResult_t ncclCommRegister(const ncclComm_t communicator, void* data, size_t,
                                          void** handle) {
  return guarded([&] {
    find_handle(communicator);
    *handle = data;
  });
}

STANDIN_API ncclResult_t ncclCommDeregister(const ncclComm_t communicator, void*) {
  return guarded([&] { find_handle(communicator); });
}
