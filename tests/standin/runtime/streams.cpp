// Keeps all streams, and knows which of them wait for each other by themselves.
//
// The legacy stream and streams that were created without cudaStreamNonBlocking wait for each
// other. torch's streams are non-blocking, so work on its default stream and on a side stream is
// ordered only by events.
#include "streams.h"

#include <string>

#include "devices.h"
#include "errors.h"

namespace standin {

Streams& Streams::get() {
  static Streams* const value = new Streams;
  return *value;
}

std::shared_ptr<Stream> Streams::add(int device, unsigned flags, int priority) {
  static unsigned long long num_streams = 0;
  auto stream = std::make_shared<Stream>();
  stream->id = ++num_streams;
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  all_[stream.get()] = stream;
  return stream;
}

cudaStream_t Streams::create(int device, unsigned flags, int priority) {
  return reinterpret_cast<cudaStream_t>(add(device, flags, priority).get());
}

std::shared_ptr<Stream> Streams::find_legacy(int device) {
  std::shared_ptr<Stream>& stream = legacy_[device];
  if (stream == nullptr) {
    stream = add(device, cudaStreamDefault, 0);
    stream->is_legacy = true;
  }
  return stream;
}

std::shared_ptr<Stream> Streams::find_per_thread(int device) {
  // The streams of this thread, by device. They stay in all_ when the thread has ended.
  thread_local auto* const own = new std::map<int, std::shared_ptr<Stream>>;
  std::shared_ptr<Stream>& stream = (*own)[device];
  if (stream == nullptr) {
    stream = add(device, cudaStreamDefault, 0);
  }
  return stream;
}

std::shared_ptr<Stream> Streams::find(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return find_legacy(current_device());
  }
  if (handle == cudaStreamPerThread) {
    return find_per_thread(current_device());
  }
  const auto found = all_.find(reinterpret_cast<const Stream*>(handle));
  const bool is_known = found != all_.end() && !found->second->is_destroyed;
  return is_known ? found->second : nullptr;
}

void Streams::destroy(const std::shared_ptr<Stream>& stream) {
  stream->is_destroyed = true;
  if (stream->has_thread) {
    Scheduler::get().wake();
  } else {
    forget(*stream);
  }
}

std::vector<std::shared_ptr<Stream>> Streams::of_device(int device) const {
  std::vector<std::shared_ptr<Stream>> result;
  for (const auto& [handle, stream] : all_) {
    if (stream->device == device) {
      result.push_back(stream);
    }
  }
  return result;
}

std::vector<Point> Streams::implicit_waits(const Stream& stream) const {
  std::vector<Point> result;
  if (!stream.is_legacy && !stream.is_blocking()) {
    return result;
  }
  for (const auto& [handle, other] : all_) {
    const bool is_ordered = stream.is_legacy ? other->is_blocking() : other->is_legacy;
    if (is_ordered && other->device == stream.device && !other->is_idle()) {
      result.push_back({other, other->num_enqueued});
    }
  }
  return result;
}

cudaError_t refuse_stream(const char* name) {
  return fail(cudaErrorInvalidResourceHandle,
              std::string(name) + " of a stream that does not exist");
}

void synchronize_device(int device) {
  Scheduler& scheduler = Scheduler::get();
  Lock lock = scheduler.lock();
  for (const auto& stream : Streams::get().of_device(device)) {
    scheduler.wait_for_all(lock, stream);
  }
}

}  // namespace standin
