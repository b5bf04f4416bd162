// The sizes of the processor's caches.
#pragma once

#include <cstdint>
#include <fstream>

namespace syncbn::cpu {

constexpr int64_t kLine = 64;  // bytes of a cache line

// The size of the last-level cache. sysconf would return the sum over all cores.
inline int64_t last_cache_bytes() {
  static const int64_t bytes = [] {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    int64_t kilobytes = 0;
    return file >> kilobytes ? kilobytes << 10 : 32 << 20;
  }();
  return bytes;
}

}  // namespace syncbn::cpu
