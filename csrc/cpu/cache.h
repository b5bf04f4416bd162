// The sizes of the processor's caches.
#pragma once

#include <cstdint>
#include <cstdio>

namespace syncbn::cpu {

constexpr int64_t kLine = 64;  // bytes of a cache line

// The size of the last-level cache. sysconf would return the sum over all cores.
inline int64_t last_cache_bytes() {
  static const int64_t bytes = [] {
    long kilobytes = 32 << 10;  // if the system does not tell
    if (std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%ld", &kilobytes) != 1) {
        kilobytes = 32 << 10;
      }
      std::fclose(file);
    }
    return static_cast<int64_t>(kilobytes) << 10;
  }();
  return bytes;
}

}  // namespace syncbn::cpu
