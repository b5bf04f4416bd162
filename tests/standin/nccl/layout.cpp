// Where the parts of the shared memory lie: the header, the members, the slots.
#include "layout.h"

#include <algorithm>

namespace standin {
namespace {

constexpr size_t kMaxSlotBytes = 128 << 10;
constexpr size_t kAllSlotBytes = 4 << 20;

}  // namespace

size_t Layout::slot_bytes(int size) {
  return std::min(kMaxSlotBytes, kAllSlotBytes / 2 / size) / kCacheLine * kCacheLine;
}

size_t Layout::slots_at(int size) { return sizeof(Header) + size * sizeof(Member); }
size_t Layout::total_bytes(int size) { return slots_at(size) + 2 * size * slot_bytes(size); }

Member& Layout::member(int rank) const {
  return reinterpret_cast<Member*>(memory_ + sizeof(Header))[rank];
}

unsigned char* Layout::slot(int rank, uint64_t meeting) const {
  return memory_ + slots_at(size_) + (2 * rank + meeting % 2) * slot_bytes();
}

}  // namespace standin
