// ncclSend and ncclRecv.
#include "buffers.h"
#include "groups.h"
#include "handles.h"
#include "standin.h"

namespace standin {
namespace {

void add_transfer(const Call& call, void* data, ncclComm_t handle, cudaStream_t stream) {
  const std::shared_ptr<Communicator> communicator = find_handle(handle);
  if (call.rank < 0 || call.rank >= communicator->size()) {
    throw Failure(ncclInvalidArgument,
                  describe(call) + " of " + std::to_string(communicator->size()) + " ranks");
  }
  check_buffer(call, "buffer", data, bytes_of(call));
  Group::of_thread().add(communicator, stream, Transfer{call, data});
}

}  // namespace
}  // namespace standin

STANDIN_API ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t communicator, cudaStream_t stream) {
  return standin::guarded([&] {
    standin::add_transfer({standin::Kind::kSend, type, count, -1, peer}, const_cast<void*>(data),
                          communicator, stream);
  });
}

STANDIN_API ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t communicator, cudaStream_t stream) {
  return standin::guarded([&] {
    standin::add_transfer({standin::Kind::kReceive, type, count, -1, peer}, data, communicator,
                          stream);
  });
}
