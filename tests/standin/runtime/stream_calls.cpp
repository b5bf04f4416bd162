// CUDA's functions for streams.
#include <string>

#include "captures.h"
#include "devices.h"
#include "enqueue.h"
#include "errors.h"
#include "events.h"
#include "standin.h"
#include "streams.h"
#include "waits.h"

using namespace standin;

STANDIN_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                     int priority) {
  if (settings().num_devices == 0) {
    return fail(cudaErrorNoDevice);
  }
  const Lock lock = Scheduler::get().lock();
  *stream = Streams::get().create(current_device(), flags, priority);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

STANDIN_API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

STANDIN_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr || stream->is_legacy) {
    return refuse_stream("cudaStreamDestroy");
  }
  if (stream->capture != nullptr) {
    stream->capture->is_invalid = true;
  }
  Streams::get().destroy(stream);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr) {
    return refuse_stream("cudaStreamGetPriority");
  }
  *priority = stream->priority;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr) {
    return refuse_stream("cudaStreamGetId");
  }
  *id = stream->id;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  constexpr const char* kName = "cudaStreamSynchronize";
  log_wait(kName);
  Scheduler& scheduler = Scheduler::get();
  Lock lock = scheduler.lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr) {
    return refuse_stream(kName);
  }
  if (const cudaError_t error = refuse_if_capturing(*stream, kName)) {
    return error;
  }
  if (const cudaError_t error = refuse_if_implicit(*stream, kName)) {
    return error;
  }
  scheduler.wait_for_all(lock, stream);
  return check_device(stream->device);
}

STANDIN_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  constexpr const char* kName = "cudaStreamQuery";
  Scheduler& scheduler = Scheduler::get();
  const Lock lock = scheduler.lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr) {
    return refuse_stream(kName);
  }
  if (const cudaError_t error = refuse_if_capturing(*stream, kName)) {
    return error;
  }
  if (const cudaError_t error = refuse_if_implicit(*stream, kName)) {
    return error;
  }
  if (const cudaError_t error = check_device(stream->device)) {
    return error;
  }
  scheduler.demand({stream, stream->num_enqueued});
  return stream->is_idle() ? cudaSuccess : fail(cudaErrorNotReady);
}

STANDIN_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event,
                                            unsigned flags) {
  constexpr const char* kName = "cudaStreamWaitEvent";
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
  return event->make_wait(lock, stream, flags);
}

STANDIN_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return enqueue(stream, make_work("host", "host function", [=] { function(data); }));
}

STANDIN_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                              void* data, unsigned) {
  if (standin_is_capturing(stream)) {
    const Lock lock = Scheduler::get().lock();
    return refuse_if_capturing(*Streams::get().find(stream), "cudaStreamAddCallback");
  }
  return enqueue(stream,
                 make_work("host", "callback", [=] { function(stream, cudaSuccess, data); }));
}

STANDIN_API void standin_flush(cudaStream_t handle) {
  Scheduler& scheduler = Scheduler::get();
  Lock lock = scheduler.lock();
  const auto stream = Streams::get().find(handle);
  if (stream != nullptr) {
    scheduler.wait_for_all(lock, stream);
  }
}
