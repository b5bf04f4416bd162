// Keeps all allocations.
#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "errors.h"
#include "settings.h"
#include "standin.h"

namespace standin {
namespace {

constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xff;

}  // namespace

void fill_with_poison(void* pointer, size_t size) { std::memset(pointer, kPoison, size); }

Memory& Memory::get() {
  static Memory* const value = new Memory;
  return *value;
}

cudaError_t Memory::allocate(void** pointer, size_t size, int device) {
  *pointer = nullptr;
  if (size == 0) {
    return cudaSuccess;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t& used = used_[device];
  if (device != kHostDevice && size > settings().device_bytes - used) {
    return fail(cudaErrorMemoryAllocation);
  }
  void* const block =
      std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
  if (block == nullptr) {
    return fail(cudaErrorMemoryAllocation);
  }
  fill_with_poison(block, size);
  used += size;
  const auto begin = reinterpret_cast<uintptr_t>(block);
  all_[begin] = {begin, size, device};
  *pointer = block;
  return cudaSuccess;
}

cudaError_t Memory::add_registered(void* pointer, size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (!all_.try_emplace(begin, Allocation{begin, size, kHostDevice, true}).second) {
    return fail(cudaErrorHostMemoryAlreadyRegistered, "memory of the host is registered twice");
  }
  used_[kHostDevice] += size;
  return cudaSuccess;
}

cudaError_t Memory::release(void* pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = all_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == all_.end()) {
    return fail(cudaErrorInvalidValue, "memory is freed that is no allocation");
  }
  used_[found->second.device] -= found->second.size;
  if (!found->second.is_registered) {
    fill_with_poison(pointer, found->second.size);
    std::free(pointer);
  }
  all_.erase(found);
  return cudaSuccess;
}

std::optional<Allocation> Memory::find(const void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = all_.upper_bound(address);
  if (next == all_.begin()) {
    return std::nullopt;
  }
  --next;
  return address < next->second.end() ? std::optional<Allocation>(next->second) : std::nullopt;
}

size_t Memory::num_used(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_[device];
}

}  // namespace standin

STANDIN_API bool standin_find_allocation(uint64_t address, uint64_t* begin, uint64_t* end,
                                         int* device) {
  const auto found = standin::Memory::get().find(reinterpret_cast<const void*>(address));
  if (!found.has_value()) {
    return false;
  }
  *begin = found->begin;
  *end = found->end();
  *device = found->device;
  return true;
}
