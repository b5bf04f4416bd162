// Collectives as work of streams.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#include "communicator.h"

namespace standin {

// A collective of one rank. A graph runs it many times.
struct Work {
  Call call;
  void* output;  // filled with 0xff if it fails, unlike any result
  size_t output_bytes;
  std::function<void(Communicator&)> body;
};

// Enqueues work; throws if that fails, or if the work fails on a stream that runs it at once.
void enqueue(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Work work);

}  // namespace standin
