// Copies and memsets.
//
// A copy to or from memory that is not pinned is not asynchronous. Such memory is read before the
// call returns, and the host waits until it is written. A copy must stay within its allocations.
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "captures.h"
#include "enqueue.h"
#include "errors.h"
#include "memory.h"
#include "standin.h"
#include "streams.h"
#include "waits.h"

using namespace standin;

namespace {

bool is_pageable(const void* pointer) { return !Memory::get().find(pointer).has_value(); }

cudaError_t check_range(const void* pointer, size_t size, const char* name) {
  const auto found = Memory::get().find(pointer);
  if (found.has_value() && reinterpret_cast<uintptr_t>(pointer) + size > found->end()) {
    return fail(cudaErrorInvalidValue,
                std::string(name) + " of " + std::to_string(size) + " bytes where " +
                    std::to_string(found->end() - reinterpret_cast<uintptr_t>(pointer)) + " are");
  }
  return cudaSuccess;
}

// Refuses a copy for which the host would have to wait, if the stream captures.
cudaError_t refuse_pageable(cudaStream_t handle) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr || stream->capture == nullptr) {
    return cudaSuccess;
  }
  return refuse(*stream->capture, cudaErrorStreamCaptureUnsupported,
                "a copy of pageable memory while the stream is capturing");
}

struct Copy {
  void* to;
  const void* from;
  size_t size;
  cudaStream_t stream;
  bool waits;        // for any kind of memory
  const char* name;  // of the call
};

std::function<void()> make_copy(const Copy& copy, bool is_from_pageable) {
  if (!is_from_pageable) {
    return [=] { std::memmove(copy.to, copy.from, copy.size); };
  }
  const auto* const first = static_cast<const char*>(copy.from);
  return [to = copy.to, staged = std::vector<char>(first, first + copy.size)] {
    std::memcpy(to, staged.data(), staged.size());
  };
}

cudaError_t enqueue_copy(const Copy& copy) {
  if (copy.size == 0) {
    return cudaSuccess;
  }
  if (const cudaError_t error = check_range(copy.to, copy.size, copy.name)) {
    return error;
  }
  if (const cudaError_t error = check_range(copy.from, copy.size, copy.name)) {
    return error;
  }
  const bool is_to_pageable = is_pageable(copy.to), is_from_pageable = is_pageable(copy.from);
  if (copy.waits || is_to_pageable || is_from_pageable) {
    if (const cudaError_t error = refuse_pageable(copy.stream)) {
      return error;
    }
  }
  const cudaError_t error =
      enqueue(copy.stream, make_work("copy", "memcpy", make_copy(copy, is_from_pageable)));
  if (error == cudaSuccess && (copy.waits || is_to_pageable)) {
    log_wait(copy.waits ? copy.name : (std::string(copy.name) + " to pageable memory").c_str());
    standin_flush(copy.stream);
  }
  return error;
}

}  // namespace

STANDIN_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                                        cudaStream_t stream) {
  return enqueue_copy({to, from, size, stream, false, "cudaMemcpyAsync"});
}

STANDIN_API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  if (const cudaError_t error = refuse_if_unsafe("cudaMemcpy")) {
    return error;
  }
  return enqueue_copy({to, from, size, cudaStreamLegacy, true, "cudaMemcpy"});
}

STANDIN_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                            cudaStream_t stream) {
  return enqueue_copy({to, from, size, stream, false, "cudaMemcpyPeerAsync"});
}

STANDIN_API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  if (is_pageable(to) && size != 0) {
    return fail(cudaErrorInvalidValue, "cudaMemsetAsync of memory that is no allocation");
  }
  if (const cudaError_t error = check_range(to, size, "cudaMemsetAsync")) {
    return error;
  }
  return enqueue(stream, make_work("copy", "memset", [=] { std::memset(to, value, size); }));
}

STANDIN_API cudaError_t cudaMemset(void* to, int value, size_t size) {
  return cudaMemsetAsync(to, value, size, cudaStreamLegacy);
}
