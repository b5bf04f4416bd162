// The communicators that callers hold.
#pragma once

#include <nccl.h>

#include <memory>
#include <string>

#include "communicator.h"

namespace standin {

// Joins a communicator. Work of streams and of graphs shares it with the handle, and may outlive
// that.
ncclComm_t join(const std::string& name, int size, int rank);

// Ends with a failure for one that does not exist, or that was destroyed.
std::shared_ptr<Communicator> find_handle(ncclComm_t handle);

// As find_handle, and the handle is gone.
std::shared_ptr<Communicator> remove_handle(ncclComm_t handle);

}  // namespace standin
