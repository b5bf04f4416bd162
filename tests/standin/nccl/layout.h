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
  alignas(kCacheLine) std::atomic<uint64_t> arrivals;  // of all ranks at all meetings
};

// A rank's arguments when a communicator is split.
struct Choice {
  int32_t color;
  int32_t key;
};

// The state of a rank.
struct alignas(kCacheLine) Member {
  std::atomic<int32_t> process;  // 0 until it has joined
  Bell bell;                     // rings when something happens that this rank may wait for
  alignas(kCacheLine) std::atomic<uint64_t> arrived;  // number of meetings so far
  Call announced[2];                                  // its call at even and at odd meetings
  alignas(kCacheLine) std::atomic<uint64_t> splits;   // number so far
  Choice chosen[2];                                   // at even and at odd splits
};

class Layout {
 public:
  Layout(void* memory, int size) : memory_(static_cast<unsigned char*>(memory)), size_(size) {}

  static size_t total_bytes(int size);
  size_t slot_bytes() const { return slot_bytes(size_); }

  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  Member& member(int rank) const;
  // A rank's part of an exchange: one for even, one for odd meetings.
  unsigned char* slot(int rank, uint64_t meeting) const;

 private:
  // Many ranks get smaller slots, so that a communicator of 64 needs some 4 MiB.
  static size_t slot_bytes(int size);
  static size_t slots_at(int size);

  unsigned char* memory_;
  int size_;
};

}  // namespace standin
