// Collectives as work of streams.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <vector>

#include "communicator.h"

namespace standin {

struct Output {
  void* data;
  size_t bytes;
};

// A collective of one rank, or the sends and receives of a group. A graph runs it many times.
struct Work {
  Call call;
  const char* name;             // in the runtime's log
  std::vector<Output> outputs;  // filled with 0xff if it fails, unlike any result
  std::function<void(Communicator&)> body;
};

// Enqueues work; throws if that fails, or if the work fails on a stream that runs it at once.
void enqueue(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Work work);

}  // namespace standin
