// The checks before a collective is enqueued.
#include "collective.h"

#include <utility>

#include "buffers.h"

namespace standin {

Collective::Collective(const Call& call, ncclComm_t handle, cudaStream_t stream)
    : call_(call), communicator_(find_handle(handle)), stream_(stream) {
  if (call.root < 0 || call.root >= size()) {
    throw Failure(ncclInvalidArgument, std::string(name_of(call.kind)) + " with root " +
                                           std::to_string(call.root) + " of " +
                                           std::to_string(size()) + " ranks");
  }
}

void Collective::check_input(const void* data) const {
  check_buffer(call_, "input", data, bytes_of(call_));
}

void Collective::add(void* output, size_t times, std::function<void(Communicator&)> body) const {
  const size_t bytes = times * bytes_of(call_);
  check_buffer(call_, "output", output, bytes);
  Group::of_thread().add(communicator_, stream_, Work{call_, output, bytes, std::move(body)});
}

}  // namespace standin
