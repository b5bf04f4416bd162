// ncclCommSplit: torch 2.15 makes its groups so. The parent's name, with a number that ranks count
// alike, tells the members where to meet.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "handles.h"
#include "standin.h"

namespace standin {
namespace {

ncclComm_t split(Communicator& parent, int color, int key) {
  const std::vector<Choice> choices = parent.choose({color, key});
  if (color == NCCL_SPLIT_NOCOLOR) {
    return nullptr;
  }
  std::vector<std::pair<int, int>> members;  // by key, then by rank
  for (int rank = 0; rank < parent.size(); ++rank) {
    if (choices[rank].color == color) {
      members.emplace_back(choices[rank].key, rank);
    }
  }
  std::sort(members.begin(), members.end());
  const auto mine = std::find(members.begin(), members.end(), std::pair(key, parent.rank()));
  return join(parent.name_of_split(color), static_cast<int>(members.size()),
              static_cast<int>(mine - members.begin()));
}

}  // namespace
}  // namespace standin

STANDIN_API ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* result,
                                       ncclConfig_t*) {
  *result = nullptr;
  return standin::guarded(
      [&] { *result = standin::split(*standin::find_handle(parent), color, key); });
}
