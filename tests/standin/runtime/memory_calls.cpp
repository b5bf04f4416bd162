// CUDA's functions that allocate and free memory at once, and that describe an address.
//
// A free waits for the work of its device, as CUDA's does: late work may still use the memory.
#include <cstring>

#include "captures.h"
#include "devices.h"
#include "errors.h"
#include "memory.h"
#include "settings.h"
#include "standin.h"
#include "streams.h"

using namespace standin;

namespace {

cudaError_t allocate_now(void** pointer, size_t size, int device, const char* name) {
  if (const cudaError_t error = refuse_if_unsafe(name)) {
    return error;
  }
  if (const cudaError_t error = check_device(current_device())) {
    return error;
  }
  standin_log("allocation", name);
  return Memory::get().allocate(pointer, size, device);
}

cudaError_t release_now(void* pointer, const char* name) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  if (const cudaError_t error = refuse_if_unsafe(name)) {
    return error;
  }
  const auto allocation = Memory::get().find(pointer);
  for (int device = 0; device < settings().num_devices; ++device) {
    if (allocation.has_value() &&
        (allocation->device == device || allocation->device == kHostDevice)) {
      synchronize_device(device);
    }
  }
  return Memory::get().release(pointer);
}

}  // namespace

STANDIN_API cudaError_t cudaMalloc(void** pointer, size_t size) {
  return allocate_now(pointer, size, current_device(), "cudaMalloc");
}

STANDIN_API cudaError_t cudaFree(void* pointer) { return release_now(pointer, "cudaFree"); }

STANDIN_API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  return allocate_now(pointer, size, kHostDevice, "cudaHostAlloc");
}

STANDIN_API cudaError_t cudaMallocHost(void** pointer, size_t size) {
  return allocate_now(pointer, size, kHostDevice, "cudaMallocHost");
}

STANDIN_API cudaError_t cudaFreeHost(void* pointer) { return release_now(pointer, "cudaFreeHost"); }

STANDIN_API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  if (const cudaError_t error = refuse_if_unsafe("cudaHostRegister")) {
    return error;
  }
  return Memory::get().add_registered(pointer, size);
}

STANDIN_API cudaError_t cudaHostUnregister(void* pointer) {
  return release_now(pointer, "cudaHostUnregister");
}

STANDIN_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = settings().device_bytes;
  *free = *total - Memory::get().num_used(current_device());
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                 const void* pointer) {
  std::memset(attributes, 0, sizeof(*attributes));
  const auto found = Memory::get().find(pointer);
  if (!found.has_value()) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;  // CUDA's own number
    return cudaSuccess;
  }
  const bool is_host = found->device == kHostDevice;
  attributes->type = is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = is_host ? 0 : found->device;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = is_host ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}
