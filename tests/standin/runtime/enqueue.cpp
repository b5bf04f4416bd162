// Takes work, from this runtime and from the other parts of the stand-in, to a stream or a capture.
//
// A failure of work that runs at once is the result of the call, so that inline mode shows the call
// that was wrong. In the other modes a later call reports it, as on a GPU.
#include "enqueue.h"

#include <memory>
#include <string>

#include "captures.h"
#include "devices.h"
#include "errors.h"
#include "settings.h"
#include "standin.h"
#include "streams.h"

namespace standin {
namespace {

void trace_work(const Stream& stream, const Work& work) {
  if (settings().traces) {
    char address[32];
    std::snprintf(address, sizeof(address), "%p", static_cast<const void*>(&stream));
    trace(std::string(stream.is_legacy ? "legacy stream" : "stream ") +
          (stream.is_legacy ? "" : address) + (stream.capture != nullptr ? " (captures)" : "") +
          ": " + work.kind() + " " + work.name());
  }
}

cudaError_t check_stream(const Stream& stream, const Work& work, bool is_launch) {
  if (is_launch && stream.device != current_device()) {
    return fail(cudaErrorInvalidResourceHandle,
                "a launch on a stream of device " + std::to_string(stream.device) +
                    " while device " + std::to_string(current_device()) + " is current");
  }
  if (const cudaError_t error = check_device(stream.device)) {
    return error;
  }
  return refuse_if_implicit(stream, work.name());
}

cudaError_t enqueue(cudaStream_t handle, const WorkPointer& work, bool is_launch) {
  if (const cudaError_t error = refuse_in_work(work->name())) {
    return error;
  }
  Scheduler& scheduler = Scheduler::get();
  Lock lock = scheduler.lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr) {
    return refuse_stream(work->name());
  }
  if (scheduler.is_stopping()) {
    return fail(cudaErrorCudartUnloading);
  }
  if (const cudaError_t error = check_stream(*stream, *work, is_launch)) {
    return error;
  }
  trace_work(*stream, *work);
  if (stream->capture != nullptr) {
    if (stream->capture->is_invalid) {
      return fail(cudaErrorStreamCaptureInvalidated, "the capture is invalid");
    }
    stream->capture->add(stream, work);
    return cudaSuccess;
  }
  work->log();
  scheduler.push(lock, stream, {work, nullptr, {}});
  lock.unlock();
  const bool runs_inline = settings().streams == StreamMode::kInline;
  return runs_inline ? check_device(stream->device) : cudaSuccess;
}

}  // namespace

cudaError_t enqueue(cudaStream_t stream, const WorkPointer& work) {
  return enqueue(stream, work, false);
}

cudaError_t enqueue_launch(cudaStream_t stream, const WorkPointer& work) {
  return enqueue(stream, work, true);
}

}  // namespace standin

STANDIN_API cudaError_t standin_enqueue(cudaStream_t stream, const StandinWork* work) {
  return standin::enqueue(stream, std::make_shared<const standin::Work>(*work));
}
