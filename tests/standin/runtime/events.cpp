// Records events, and makes streams and the host wait for them.
// In late mode one query does not make work run, but repeated queries do.
#include "events.h"

#include <string>

#include "devices.h"
#include "errors.h"
#include "standin.h"
#include "streams.h"
#include "waits.h"

using namespace standin;

namespace {

constexpr int kQueriesThatWait = 3;

cudaError_t refuse_external(Capture& capture) {
  return refuse(capture, cudaErrorNotSupported, "an external event in a capture");
}

cudaError_t refuse_if_captured(const CUevent_st& event, const char* name) {
  if (!event.is_captured()) {
    return cudaSuccess;
  }
  return refuse(*event.capture, cudaErrorCapturedEvent, std::string(name) + " of a captured event");
}

}  // namespace

cudaError_t CUevent_st::record(Lock& lock, const std::shared_ptr<Stream>& stream,
                               unsigned record_flags) {
  if (stream->device != device) {
    return fail(cudaErrorInvalidResourceHandle, "an event and a stream of two devices");
  }
  if (stream->capture != nullptr) {
    if ((record_flags & cudaEventRecordExternal) != 0) {
      return refuse_external(*stream->capture);
    }
    capture = stream->capture;
    nodes = capture->frontiers[stream].nodes;
    return cudaSuccess;
  }
  capture = nullptr;
  mark = std::make_shared<Mark>(Mark{{stream, stream->num_enqueued + 1}});
  Scheduler::get().push(lock, stream, {nullptr, mark, {}});
  return cudaSuccess;
}

cudaError_t CUevent_st::make_wait(Lock& lock, const std::shared_ptr<Stream>& stream,
                                  unsigned wait_flags) const {
  if (stream->capture != nullptr && (wait_flags & cudaEventWaitExternal) != 0) {
    return refuse_external(*stream->capture);
  }
  if (is_captured()) {
    if (stream->capture != nullptr && stream->capture != capture) {
      stream->capture->is_invalid = true;
      return refuse(*capture, cudaErrorStreamCaptureMerge,
                    "a stream that is capturing waits for an event of another capture");
    }
    if (stream->is_legacy) {
      return refuse(*capture, cudaErrorStreamCaptureImplicit,
                    "the legacy stream waits for a captured event");
    }
    stream->capture = capture;
    capture->frontiers[stream].add(nodes);
    return cudaSuccess;
  }
  if (mark == nullptr) {
    return cudaSuccess;
  }
  if (stream->capture != nullptr) {
    return refuse(*stream->capture, cudaErrorStreamCaptureIsolation,
                  "a stream that is capturing waits for an event from outside");
  }
  Scheduler::get().push(lock, stream, {nullptr, nullptr, {mark->point}});
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->device = current_device();
  (*event)->flags = flags;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

STANDIN_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock = Scheduler::get().lock();
  delete event;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle,
                                                 unsigned flags) {
  constexpr const char* kName = "cudaEventRecord";
  if (const cudaError_t error = refuse_in_work(kName)) {
    return error;
  }
  Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr) {
    return refuse_stream(kName);
  }
  if (const cudaError_t error = refuse_if_implicit(*stream, kName)) {
    return error;
  }
  return event->record(lock, stream, flags);
}

STANDIN_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

STANDIN_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  constexpr const char* kName = "cudaEventQuery";
  if (const cudaError_t error = refuse_if_unsafe(kName)) {
    return error;
  }
  Scheduler& scheduler = Scheduler::get();
  const Lock lock = scheduler.lock();
  if (const cudaError_t error = refuse_if_captured(*event, kName)) {
    return error;
  }
  if (event->mark == nullptr || is_reached(event->mark->point)) {
    return check_device(event->device);
  }
  if (++event->mark->num_queries >= kQueriesThatWait) {
    scheduler.demand(event->mark->point);
  }
  return fail(cudaErrorNotReady);
}

STANDIN_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  constexpr const char* kName = "cudaEventSynchronize";
  log_wait(kName);
  Scheduler& scheduler = Scheduler::get();
  Lock lock = scheduler.lock();
  if (const cudaError_t error = refuse_if_captured(*event, kName)) {
    return error;
  }
  const int device = event->device;
  if (const auto mark = event->mark) {  // the event may be recorded again in the meantime
    scheduler.wait(lock, mark->point);
  }
  return check_device(device);
}

STANDIN_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin,
                                             cudaEvent_t end) {
  const Lock lock = Scheduler::get().lock();
  for (const cudaEvent_t event : {begin, end}) {
    if (event->mark == nullptr) {
      return fail(cudaErrorInvalidResourceHandle, "the time of an event that was not recorded");
    }
    if ((event->flags & cudaEventDisableTiming) != 0) {
      return fail(cudaErrorInvalidResourceHandle, "the time of an event without timing");
    }
    if (!is_reached(event->mark->point)) {
      return fail(cudaErrorNotReady);
    }
  }
  const std::chrono::duration<float, std::milli> elapsed = end->mark->time - begin->mark->time;
  *milliseconds = elapsed.count();
  return cudaSuccess;
}
