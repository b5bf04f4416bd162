// All streams, by their handles.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <vector>

#include "scheduler.h"
#include "stream.h"

namespace standin {

// Requires the scheduler's lock.
class Streams {
 public:
  static Streams& get();

  cudaStream_t create(int device, unsigned flags, int priority);

  // Returns the stream of a handle, also of the default streams of the current device, or null if
  // it is no handle.
  std::shared_ptr<Stream> find(cudaStream_t handle);

  // Makes a stream's handle unknown; enqueued work still runs.
  void destroy(const std::shared_ptr<Stream>& stream);

  // Forgets a destroyed stream, which has no work any more.
  void forget(const Stream& stream) { all_.erase(&stream); }

  std::vector<std::shared_ptr<Stream>> of_device(int device) const;

  // The points that a stream's next task implicitly waits for: in the legacy stream those of its
  // device's blocking streams, in a blocking stream the legacy stream's.
  std::vector<Point> implicit_waits(const Stream& stream) const;

 private:
  std::shared_ptr<Stream> add(int device, unsigned flags, int priority);
  std::shared_ptr<Stream> find_legacy(int device);
  std::shared_ptr<Stream> find_per_thread(int device);

  std::map<const Stream*, std::shared_ptr<Stream>> all_;
  std::map<int, std::shared_ptr<Stream>> legacy_;  // by device
};

// The error of a call with a handle that Streams::find() does not know.
cudaError_t refuse_stream(const char* name);

// Waits for all work of a device, except work that is being captured.
void synchronize_device(int device);

}  // namespace standin
