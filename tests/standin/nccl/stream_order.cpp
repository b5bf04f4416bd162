// Records an event after each piece of work; a different stream of the next one waits for it.
#include "stream_order.h"

#include <string>

#include "failure.h"

namespace standin {
namespace {

void require(cudaError_t error) {
  if (error != cudaSuccess) {
    throw Failure(ncclUnhandledCudaError, cudaGetErrorString(error));
  }
}

// 0 outside of captures.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  require(cudaStreamGetCaptureInfo(stream, &status, &number));
  return status == cudaStreamCaptureStatusNone ? 0 : number;
}

}  // namespace

StreamOrder::~StreamOrder() {
  for (const Last* last : {&uncaptured_, &captured_}) {
    if (last->event != nullptr) {
      cudaEventDestroy(last->event);
    }
  }
}

void StreamOrder::enqueue(cudaStream_t stream, const std::function<void()>& enqueue) {
  // Work that runs at once runs under this lock: other threads' work comes after it.
  const std::lock_guard<std::mutex> lock(mutex_);
  const unsigned long long capture = capture_of(stream);
  Last& last = capture == 0 ? uncaptured_ : captured_;
  if (last.event == nullptr) {
    require(cudaEventCreateWithFlags(&last.event, cudaEventDisableTiming));
  } else if (stream != last.stream && capture == last.capture) {
    require(cudaStreamWaitEvent(stream, last.event, 0));
  }
  enqueue();
  last.stream = stream;
  last.capture = capture;
  require(cudaEventRecord(last.event, stream));
}

void StreamOrder::synchronize() {
  cudaEvent_t event;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    event = uncaptured_.event;
  }
  if (event != nullptr) {
    require(cudaEventSynchronize(event));
  }
}

}  // namespace standin
