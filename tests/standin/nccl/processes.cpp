// Processes are followed by pidfd_open, of Linux 5.3.
#include "processes.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace standin {

Process::Process(pid_t id)
    : id_(id), descriptor_(static_cast<int>(syscall(SYS_pidfd_open, id, 0))) {}

Process::~Process() {
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

bool Process::has_ended() const {
  if (descriptor_ < 0) {  // it has ended before, or the kernel is old
    return kill(id_, 0) != 0 && errno == ESRCH;
  }
  pollfd question{descriptor_, POLLIN, 0};
  return poll(&question, 1, 0) == 1;
}

}  // namespace standin
