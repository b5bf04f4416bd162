// How ranks give each other values: each writes a piece into its slot, all meet, and all read.
#pragma once

#include <functional>

#include "communicator.h"

namespace standin {

// The slots of a meeting.
class Slots {
 public:
  Slots(const Layout& layout, uint64_t meeting) : layout_(&layout), meeting_(meeting) {}
  unsigned char* of(int rank) const { return layout_->slot(rank, meeting_); }

 private:
  const Layout* layout_;
  uint64_t meeting_;
};

// Puts a rank's bytes, from `offset` to `offset + length`, into its slot; empty if it gives none.
using Write = std::function<void(unsigned char* slot, size_t offset, size_t length)>;
// Takes such bytes from the ranks' slots; empty if this rank needs none.
using Read = std::function<void(const Slots& slots, size_t offset, size_t length)>;

// Exchanges the call's values, in as many meetings as they need, at least one.
void exchange(Communicator& communicator, const Call& call, const Write& write, const Read& read);

}  // namespace standin
