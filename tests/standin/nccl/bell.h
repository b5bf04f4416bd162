// A bell in shared memory, for threads of any process that have nothing to do until it rings.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace standin {

class Bell {
 public:
  uint32_t rings() const { return rings_.load(); }
  void ring();

  // Sleeps until the bell has rung since rings() returned `seen`; false once time is over.
  bool sleep(uint32_t seen, std::chrono::milliseconds time);

 private:
  std::atomic<uint32_t> rings_;
  std::atomic<uint32_t> sleepers_;  // most rings find nobody asleep, and need no system call
};

}  // namespace standin
