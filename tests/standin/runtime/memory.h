// Memory of the devices and pinned memory of the host: all of it is this process's own.
//
// New and freed memory is filled with 0xff, which is NaN or -1, so that reading unwritten memory
// gives a wrong result. All allocations are known, so that kernels can be checked to stay within
// them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace standin {

constexpr int kHostDevice = -1;  // of pinned memory

struct Allocation {
  uintptr_t begin = 0;
  size_t size = 0;
  int device = kHostDevice;
  bool is_registered = false;  // the caller's own, by cudaHostRegister()

  uintptr_t end() const { return begin + size; }
};

class Memory {
 public:
  static Memory& get();

  // Allocates memory of a device, or of the host; no bytes are null.
  cudaError_t allocate(void** pointer, size_t size, int device);

  // Makes memory of the caller pinned.
  cudaError_t add_registered(void* pointer, size_t size);

  cudaError_t release(void* pointer);

  // Returns the allocation that holds an address.
  std::optional<Allocation> find(const void* pointer);

  size_t num_used(int device);

 private:
  std::mutex mutex_;
  std::map<uintptr_t, Allocation> all_;  // by their first address
  std::map<int, size_t> used_;           // bytes, by device
};

void fill_with_poison(void* pointer, size_t size);

}  // namespace standin
