// The memory that a communicator's ranks share, and its layout. Shared memory begins as zeros, the
// first state of all objects here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "bell.h"
#include "call.h"

namespace standin {

constexpr int kMaxRanks = 64;
constexpr size_t kCacheLine = 64;

// The shared state of all ranks.
struct alignas(kCacheLine) Header {
  std::atomic<int32_t> size;    // of the communicator, as its first rank says
  std::atomic<int32_t> joined;  // number of ranks that have joined
  // The first failure, for all ranks.
  std::atomic<int32_t> failure;  // 0: none, 1: being written, 2: written
  int32_t code;
  char words[1024];
};

// The state of a rank.
struct alignas(kCacheLine) Member {
  std::atomic<int32_t> process;  // 0 until it has joined
  Bell bell;                     // rings when something happens that this rank may wait for
};

// A rank's arguments when a communicator is split.
struct Choice {
  int32_t color;
  int32_t key;
};

// A rank's place in a lane, in which ranks meet any number of times.
struct alignas(kCacheLine) Place {
  std::atomic<uint64_t> arrived;  // number of meetings so far
  // At even and at odd meetings:
  Call announced[2];  // its call
  Choice chosen[2];
};

// Streams' work meets in one lane, hosts' calls in another, because hosts do not wait for streams.
enum Lane { kDeviceLane, kHostLane, kNumLanes };

struct alignas(kCacheLine) Counter {
  std::atomic<uint64_t> arrivals;  // of all ranks at all meetings of the lane
};

// Bytes on their way from one rank to another; they follow it in memory.
struct alignas(kCacheLine) Channel {
  std::atomic<uint64_t> written;
  alignas(kCacheLine) std::atomic<uint64_t> read;
};

class Layout {
 public:
  Layout() = default;
  Layout(void* memory, int size) : memory_(static_cast<unsigned char*>(memory)), size_(size) {}

  // Many ranks get smaller parts, so that a communicator of 64 needs some 20 MiB.
  static size_t slot_bytes(int size);
  static size_t ring_bytes(int size);
  static size_t total_bytes(int size);

  size_t slot_bytes() const { return slot_bytes(size_); }
  size_t ring_bytes() const { return ring_bytes(size_); }

  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  Member& member(int rank) const;
  Counter& counter(Lane lane) const;
  Place& place(Lane lane, int rank) const;
  // A rank's part of an exchange: one for even, one for odd meetings.
  unsigned char* slot(int rank, uint64_t meeting) const;
  Channel& channel(int from, int to) const;
  unsigned char* ring(int from, int to) const;

 private:
  static size_t members_at();
  static size_t counters_at(int size);
  static size_t places_at(int size);
  static size_t slots_at(int size);
  static size_t channels_at(int size);

  unsigned char* memory_ = nullptr;
  int size_ = 0;
};

}  // namespace standin
