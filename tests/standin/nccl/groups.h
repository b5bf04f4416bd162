// ncclGroupStart and ncclGroupEnd: calls of a thread that are enqueued together.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>
#include <vector>

#include "work.h"

namespace standin {

class Group {
 public:
  // Each thread has one, which is open between a start and its end.
  static Group& of_thread();

  void start() { ++depth_; }
  // Enqueues what was added since the outermost start.
  void end();

  // Outside of a group, this enqueues at once.
  void add(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Work work);

 private:
  struct Pending {
    std::shared_ptr<Communicator> communicator;
    cudaStream_t stream;
    Work work;
  };

  int depth_ = 0;
  std::vector<Pending> pending_;
};

}  // namespace standin
