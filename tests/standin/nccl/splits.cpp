// Communicators made of another one's ranks. Its name, with a number that ranks count alike, tells
// the new one's members where to meet.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "handles.h"
#include "standin.h"

namespace standin {
namespace {

ncclComm_t split(Communicator& parent, int color, int key) {
  const std::unique_lock<std::mutex> lock = parent.lock_host();
  const Call call{Kind::kSplit};
  const Layout& layout = parent.layout();
  layout.place(kHostLane, parent.rank()).chosen[parent.next_meeting(kHostLane) % 2] = {color, key};
  const uint64_t meeting = parent.meet(kHostLane, &call);
  const int number = parent.next_child();
  if (color == NCCL_SPLIT_NOCOLOR) {
    return nullptr;
  }
  std::vector<std::pair<int, int>> members;  // by key, then by rank
  for (int rank = 0; rank < parent.size(); ++rank) {
    const Choice theirs = layout.place(kHostLane, rank).chosen[meeting % 2];
    if (theirs.color == color) {
      members.emplace_back(theirs.key, rank);
    }
  }
  std::sort(members.begin(), members.end());
  const auto mine = std::find(members.begin(), members.end(), std::pair(key, parent.rank()));
  return join(parent.name() + "-" + std::to_string(number) + "-" + std::to_string(color),
              static_cast<int>(members.size()), static_cast<int>(mine - members.begin()));
}

// The ranks left out take no part: one of them may have died.
ncclComm_t shrink(Communicator& parent, const std::vector<int>& excluded) {
  int size = 0;
  int mine = 0;
  for (int rank = 0; rank < parent.size(); ++rank) {
    if (std::find(excluded.begin(), excluded.end(), rank) == excluded.end()) {
      mine += rank < parent.rank() ? 1 : 0;
      ++size;
    } else if (rank == parent.rank()) {
      throw Failure(ncclInvalidArgument, "a rank cannot exclude itself");
    }
  }
  return join(parent.name() + "-" + std::to_string(parent.next_child()) + "-shrunk", size, mine);
}

}  // namespace
}  // namespace standin

using standin::guarded;

STANDIN_API ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* result,
                                       ncclConfig_t*) {
  *result = nullptr;
  return guarded([&] { *result = standin::split(*standin::find_handle(parent), color, key); });
}

STANDIN_API ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int num_excluded,
                                        ncclComm_t* result, ncclConfig_t*, int flags) {
  *result = nullptr;
  return guarded([&] {
    const auto communicator = standin::find_handle(parent);
    if (flags == NCCL_SHRINK_ABORT) {
      communicator->abort();
    }
    *result = standin::shrink(*communicator, {excluded, excluded + num_excluded});
  });
}
