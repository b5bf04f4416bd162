// Keeps the addresses that are handles.
#include "handles.h"

#include <map>
#include <mutex>
#include <utility>

struct ncclComm {};

namespace standin {
namespace {

struct Handles {
  std::mutex mutex;
  std::map<ncclComm_t, std::shared_ptr<Communicator>> all;
};

// Threads of streams outlive main(), so it is never destroyed.
Handles& handles() {
  static auto* const value = new Handles;
  return *value;
}

}  // namespace

ncclComm_t join(const std::string& name, int size, int rank) {
  auto communicator = std::make_shared<Communicator>(name, size, rank);
  const std::lock_guard<std::mutex> lock(handles().mutex);
  auto* const handle = new ncclComm;
  handles().all[handle] = std::move(communicator);
  return handle;
}

std::shared_ptr<Communicator> find_handle(ncclComm_t handle) {
  const std::lock_guard<std::mutex> lock(handles().mutex);
  const auto found = handles().all.find(handle);
  if (found == handles().all.end()) {
    throw Failure(ncclInvalidArgument, "a communicator that does not exist or was destroyed");
  }
  return found->second;
}

// The handle itself is kept, so that no other communicator gets its address.
std::shared_ptr<Communicator> remove_handle(ncclComm_t handle) {
  std::shared_ptr<Communicator> communicator = find_handle(handle);
  const std::lock_guard<std::mutex> lock(handles().mutex);
  handles().all.erase(handle);
  return communicator;
}

}  // namespace standin
