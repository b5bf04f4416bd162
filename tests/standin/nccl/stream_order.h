// NCCL orders the work of a communicator as the host enqueues it, whichever streams it is on.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>

namespace standin {

class StreamOrder {
 public:
  StreamOrder() = default;
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;
  ~StreamOrder();

  // Calls `enqueue` so that its work runs after all earlier work.
  void enqueue(cudaStream_t stream, const std::function<void()>& enqueue);
  // Waits for all work that was enqueued outside of captures.
  void synchronize();

 private:
  // The last work.
  struct Last {
    cudaEvent_t event = nullptr;  // recorded after it
    cudaStream_t stream = nullptr;
    unsigned long long capture = 0;  // the capture of the work
  };

  std::mutex mutex_;
  Last uncaptured_;
  Last captured_;
};

}  // namespace standin
