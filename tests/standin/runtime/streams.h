// All streams, by their handles.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <vector>

#include "scheduler.h"
#include "stream.h"

namespace standin {

// To be used with the scheduler's lock.
class Streams {
 public:
  static Streams& get();

  cudaStream_t create(int device, unsigned flags, int priority);

  // Returns the stream of a handle, also of the default streams of the current device, or null for
  // what is no handle.
  std::shared_ptr<Stream> find(cudaStream_t handle);

  // Makes a stream's handle unknown; what was enqueued still runs.
  void destroy(const std::shared_ptr<Stream>& stream);

  // Forgets a destroyed stream, which has no work any more.
  void forget(const Stream& stream) { all_.erase(&stream); }

  std::vector<std::shared_ptr<Stream>> of_device(int device) const;

  // What the next task of a stream waits for without being told to: one of the legacy stream for
  // all blocking streams of its device, one of these for the legacy stream.
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

// Waits for all work of a device, but for what is being captured.
void synchronize_device(int device);

}  // namespace standin
