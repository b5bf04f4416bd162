// The pages of an output's memory.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace syncbn::cpu {

// Returns whether an output's memory has no pages of the system yet, by a look at three of them.
// Memory that an allocator has just got has none: the system clears each page when it is first
// written. It is asked to give huge pages there, with one fault in place of 512.
inline bool prepare_output(void* memory, int64_t num_bytes) {
#if defined(__linux__)
  constexpr int64_t kHugePage = 2 << 20;
  if (num_bytes < 2 * kHugePage) {
    return false;  // too small for huge pages
  }
  static const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  auto* const begin = static_cast<char*>(memory);
  // The first address from here on that is a multiple of `bytes`.
  const auto align = [](char* from, int64_t bytes) {
    return from + (bytes - reinterpret_cast<uintptr_t>(from) % bytes) % bytes;
  };
  for (int quarter = 1; quarter <= 3; ++quarter) {
    char* const page = align(begin + num_bytes / 4 * quarter, page_bytes);
    unsigned char is_there = 1;
    // An error, as of a sandbox, says nothing.
    if (mincore(page, 1, &is_there) == 0 && (is_there & 1) == 0) {
#if defined(MADV_HUGEPAGE)
      char* const first = align(begin, kHugePage);
      madvise(first, (begin + num_bytes - first) / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
      return true;
    }
  }
#else
  static_cast<void>(memory);
  static_cast<void>(num_bytes);
#endif
  return false;
}

}  // namespace syncbn::cpu
