// The communicators that callers hold.
#pragma once

#include <nccl.h>

#include <memory>
#include <string>

#include "communicator.h"

namespace standin {

// Joins a communicator. Work of streams and of graphs shares it with the handle, and may outlive
// the handle.
ncclComm_t join(const std::string& name, int size, int rank);

// Throws a Failure for a handle that does not exist, or was destroyed.
std::shared_ptr<Communicator> find_handle(ncclComm_t handle);

// Like find_handle, but also removes the handle.
std::shared_ptr<Communicator> remove_handle(ncclComm_t handle);

}  // namespace standin
