// Bells are futexes.
#include "bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace standin {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share them");

void Bell::ring() {
  ++rings_;
  if (sleepers_ > 0) {
    syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool Bell::sleep(uint32_t seen, std::chrono::milliseconds time) {
  const std::timespec timeout{time.count() / 1000, time.count() % 1000 * 1'000'000};
  ++sleepers_;
  const long result = syscall(SYS_futex, &rings_, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  const bool is_over = result != 0 && errno == ETIMEDOUT;
  --sleepers_;
  return !is_over;
}

}  // namespace standin
