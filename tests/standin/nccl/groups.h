// ncclGroupStart and ncclGroupEnd: calls of a thread that are enqueued together.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>
#include <vector>

#include "transfers.h"
#include "work.h"

namespace standin {

class Group {
 public:
  // Each thread has one, which is open between a start and its end.
  static Group& of_thread();

  void start() { ++depth_; }
  // Enqueues what was added since the outermost start.
  void end();

  // Outside of a group, these enqueue at once.
  void add(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Work work);
  void add(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream,
           const Transfer& transfer);

 private:
  // The pending calls of one communicator.
  struct Part {
    std::shared_ptr<Communicator> communicator;
    std::vector<std::pair<cudaStream_t, Work>> collectives;
    std::vector<Transfer> transfers;
    cudaStream_t stream = nullptr;  // of the transfers
  };

  Part& part_of(const std::shared_ptr<Communicator>& communicator);
  static void enqueue_part(Part& part);
  static void enqueue_parts(std::vector<Part>& parts);

  int depth_ = 0;
  std::vector<Part> parts_;
};

}  // namespace standin
