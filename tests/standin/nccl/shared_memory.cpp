// Shared memory of POSIX. All pages are allocated at once: a process that later finds none would
// die.
#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "failure.h"

namespace standin {

SharedMemory::SharedMemory(std::string name, size_t bytes) : name_(std::move(name)), bytes_(bytes) {
  const int file = shm_open(name_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  int error = file < 0 ? errno : posix_fallocate(file, 0, static_cast<off_t>(bytes));
  if (error == 0) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    error = data_ == MAP_FAILED ? errno : 0;
  }
  if (file >= 0) {
    close(file);
  }
  if (error != 0) {
    throw Failure(ncclSystemError,
                  "no " + std::to_string(bytes) +
                      " bytes of shared memory for a communicator: " + std::strerror(error));
  }
}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

void SharedMemory::forget_name() { shm_unlink(name_.c_str()); }

}  // namespace standin
