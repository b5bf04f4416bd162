// How ranks give each other values: each writes a piece into its slot, all meet, and all read.
#pragma once

#include <functional>
#include <vector>

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

// The actions of a rank on bytes `offset` to `offset + length` of its buffers.
struct Exchange {
  // Puts this rank's piece into its slot; empty if it has none.
  std::function<void(unsigned char* slot, size_t offset, size_t length)> write;
  // Takes from all ranks' slots.
  std::function<void(const Slots& slots, size_t offset, size_t length)> read;
};

// Exchanges `bytes`, in as many meetings as slots of `parts` pieces require, at least one.
void exchange(Communicator& communicator, const Call& call, size_t bytes, size_t parts,
              const Exchange& exchange);

// The distance of the parts in a slot.
size_t part_bytes(const Communicator& communicator, size_t parts);

}  // namespace standin
