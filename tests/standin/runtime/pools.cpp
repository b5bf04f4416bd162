// Memory in the order of streams: cudaMallocAsync(), cudaFreeAsync() and the pool of each device.
// The address is valid at once, but the memory is filled with 0xff when the stream reaches the
// allocation: earlier writes of another stream are lost. The memory is freed when the stream
// reaches the free. The pool itself keeps nothing.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>

#include "devices.h"
#include "enqueue.h"
#include "errors.h"
#include "memory.h"
#include "standin.h"
#include "streams.h"

// The default pool of a device, the only one that it has.
struct CUmemPoolHandle_st {
  std::mutex mutex;
  int device = 0;
  uint64_t num_used = 0;
  uint64_t most_used = 0;
  uint64_t release_threshold = 0;  // kept for queries
  std::map<int, int> switches;     // attributes that change nothing here

  void count(int64_t num_bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    num_used += num_bytes;
    most_used = std::max(most_used, num_used);
  }
};

using namespace standin;

namespace {

cudaMemPool_t find_pool(int device) {
  // The pools by device, which are never destroyed.
  static std::mutex* const mutex = new std::mutex;
  static auto* const pools = new std::map<int, std::unique_ptr<CUmemPoolHandle_st>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& pool = (*pools)[device];
  if (pool == nullptr) {
    pool = std::make_unique<CUmemPoolHandle_st>();
    pool->device = device;
  }
  return pool.get();
}

// Memory of an allocation that was captured; each launch uses the same one.
struct GraphMemory {
  void* pointer;
  explicit GraphMemory(void* p) : pointer(p) {}
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;
  ~GraphMemory() { Memory::get().release(pointer); }
};

int find_device(cudaStream_t handle) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  return stream == nullptr ? current_device() : stream->device;
}

cudaError_t allocate_captured(void** pointer, size_t size, int device, cudaStream_t stream) {
  if (const cudaError_t error = Memory::get().allocate(pointer, size, device, Origin::kGraph)) {
    return error;
  }
  const auto owner = std::make_shared<GraphMemory>(*pointer);
  return enqueue(stream, make_work("memory", "cudaMallocAsync",
                                   [owner, size] { fill_with_poison(owner->pointer, size); }));
}

cudaError_t allocate_from_pool(void** pointer, size_t size, int device, cudaStream_t stream) {
  if (Memory::get().allocate(pointer, size, device, Origin::kPool) != cudaSuccess) {
    standin_flush(stream);  // frees may be enqueued
    if (const cudaError_t error = Memory::get().allocate(pointer, size, device, Origin::kPool)) {
      return error;
    }
  }
  const cudaError_t error =
      enqueue(stream, make_work("memory", "cudaMallocAsync",
                                [memory = *pointer, size] { fill_with_poison(memory, size); }));
  if (error != cudaSuccess) {
    Memory::get().release(*pointer);
    *pointer = nullptr;
    return error;
  }
  find_pool(device)->count(static_cast<int64_t>(size));
  return cudaSuccess;
}

cudaError_t release_in_graph(void* pointer, size_t size, cudaStream_t stream) {
  return enqueue(stream, make_work("memory", "cudaFreeAsync",
                                   [pointer, size] { fill_with_poison(pointer, size); }));
}

}  // namespace

STANDIN_API cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t stream) {
  *pointer = nullptr;
  const int device = find_device(stream);
  if (const cudaError_t error = check_device(device)) {
    return error;
  }
  if (size == 0) {
    return cudaSuccess;
  }
  standin_log("allocation", "cudaMallocAsync");
  return standin_is_capturing(stream) ? allocate_captured(pointer, size, device, stream)
                                      : allocate_from_pool(pointer, size, device, stream);
}

STANDIN_API cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t size, cudaMemPool_t,
                                                cudaStream_t stream) {
  return cudaMallocAsync(pointer, size, stream);
}

STANDIN_API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  const auto found = Memory::get().find(pointer);
  if (!found.has_value() || found->begin != reinterpret_cast<uintptr_t>(pointer)) {
    return fail(cudaErrorInvalidValue, "cudaFreeAsync of memory that is no allocation");
  }
  if (found->origin == Origin::kGraph) {
    return release_in_graph(pointer, found->size, stream);
  }
  if (standin_is_capturing(stream)) {
    return fail(cudaErrorInvalidValue,
                "cudaFreeAsync in a capture of memory that was not allocated in it");
  }
  if (!Memory::get().mark_free(pointer)) {
    return fail(cudaErrorInvalidValue, "cudaFreeAsync of memory that is freed already");
  }
  const cudaError_t error = enqueue(
      stream, make_work("memory", "cudaFreeAsync", [pointer] { Memory::get().release(pointer); }));
  if (error == cudaSuccess && found->origin == Origin::kPool) {
    find_pool(found->device)->count(-static_cast<int64_t>(found->size));
  }
  return error;
}

STANDIN_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  if (!is_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  *pool = find_pool(device);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return cudaDeviceGetDefaultMemPool(pool, device);
}

STANDIN_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute,
                                                void* value) {
  const std::lock_guard<std::mutex> lock(pool->mutex);
  switch (attribute) {
    case cudaMemPoolAttrReleaseThreshold:
      pool->release_threshold = *static_cast<uint64_t*>(value);
      break;
    case cudaMemPoolAttrUsedMemHigh:
    case cudaMemPoolAttrReservedMemHigh:
      pool->most_used = pool->num_used;
      break;
    default:
      pool->switches[attribute] = *static_cast<int*>(value);
  }
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute,
                                                void* value) {
  const std::lock_guard<std::mutex> lock(pool->mutex);
  auto* const number = static_cast<uint64_t*>(value);
  switch (attribute) {
    case cudaMemPoolAttrReleaseThreshold:
      *number = pool->release_threshold;
      break;
    case cudaMemPoolAttrUsedMemCurrent:
    case cudaMemPoolAttrReservedMemCurrent:
      *number = pool->num_used;
      break;
    case cudaMemPoolAttrUsedMemHigh:
    case cudaMemPoolAttrReservedMemHigh:
      *number = pool->most_used;
      break;
    default:
      *static_cast<int*>(value) = pool->switches[attribute];
  }
  return cudaSuccess;
}

// Each device can use each other's memory.
STANDIN_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// Graphs keep exactly the memory that was captured.
STANDIN_API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType,
                                                       void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) {
  return cudaSuccess;
}
