// The pages of a tensor's memory.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace syncbn::cpu {

// Whether the memory has pages of the system, by a look at three of them. Memory that an allocator
// has just got from the system has none: the system clears each page when it is first written.
inline bool has_pages(void* memory, int64_t num_bytes) {
#if defined(__linux__)
  static const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  for (int quarter = 1; quarter <= 3; ++quarter) {
    auto* page = static_cast<char*>(memory) + num_bytes / 4 * quarter;
    page -= reinterpret_cast<uintptr_t>(page) % page_bytes;
    unsigned char is_there = 1;
    // An error, as of a sandbox, says nothing.
    if (mincore(page, 1, &is_there) == 0 && (is_there & 1) == 0) {
      return false;
    }
  }
#else
  static_cast<void>(memory);
  static_cast<void>(num_bytes);
#endif
  return true;
}

}  // namespace syncbn::cpu
