// Where the parts of the shared memory lie.
#include "layout.h"

#include <algorithm>

namespace standin {
namespace {

constexpr size_t kMaxSlotBytes = 128 << 10;
constexpr size_t kMaxRingBytes = 128 << 10;
constexpr size_t kAllSlotBytes = 4 << 20;
constexpr size_t kRingBytesOfRank = 256 << 10;

size_t in_lines(size_t bytes) { return bytes / kCacheLine * kCacheLine; }

}  // namespace

size_t Layout::slot_bytes(int size) {
  return in_lines(std::min(kMaxSlotBytes, kAllSlotBytes / 2 / size));
}

size_t Layout::ring_bytes(int size) {
  return in_lines(std::min(kMaxRingBytes, kRingBytesOfRank / size));
}

size_t Layout::members_at() { return sizeof(Header); }
size_t Layout::counters_at(int size) { return members_at() + size * sizeof(Member); }
size_t Layout::places_at(int size) { return counters_at(size) + kNumLanes * sizeof(Counter); }
size_t Layout::slots_at(int size) { return places_at(size) + kNumLanes * size * sizeof(Place); }
size_t Layout::channels_at(int size) { return slots_at(size) + 2 * size * slot_bytes(size); }

size_t Layout::total_bytes(int size) {
  return channels_at(size) + size * size * (sizeof(Channel) + ring_bytes(size));
}

Member& Layout::member(int rank) const {
  return reinterpret_cast<Member*>(memory_ + members_at())[rank];
}

Counter& Layout::counter(Lane lane) const {
  return reinterpret_cast<Counter*>(memory_ + counters_at(size_))[lane];
}

Place& Layout::place(Lane lane, int rank) const {
  return reinterpret_cast<Place*>(memory_ + places_at(size_))[lane * size_ + rank];
}

unsigned char* Layout::slot(int rank, uint64_t meeting) const {
  return memory_ + slots_at(size_) + (2 * rank + meeting % 2) * slot_bytes();
}

Channel& Layout::channel(int from, int to) const {
  const size_t stride = sizeof(Channel) + ring_bytes();
  return *reinterpret_cast<Channel*>(memory_ + channels_at(size_) + (from * size_ + to) * stride);
}

unsigned char* Layout::ring(int from, int to) const {
  return reinterpret_cast<unsigned char*>(&channel(from, to) + 1);
}

}  // namespace standin
