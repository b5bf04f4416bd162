// Calls of a group are enqueued in their order.
#include "groups.h"

#include "standin.h"

namespace standin {

Group& Group::of_thread() {
  static thread_local Group group;
  return group;
}

void Group::add(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Work work) {
  if (depth_ == 0) {
    enqueue(communicator, stream, std::move(work));
  } else {
    pending_.push_back({communicator, stream, std::move(work)});
  }
}

void Group::end() {
  if (depth_ == 0) {
    throw Failure(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  }
  if (--depth_ == 0) {
    std::vector<Pending> pending = std::move(pending_);
    pending_.clear();
    for (Pending& one : pending) {
      enqueue(one.communicator, one.stream, std::move(one.work));
    }
  }
}

}  // namespace standin

STANDIN_API ncclResult_t ncclGroupStart() {
  standin::Group::of_thread().start();
  return ncclSuccess;
}

STANDIN_API ncclResult_t ncclGroupEnd() {
  return standin::guarded([] { standin::Group::of_thread().end(); });
}
