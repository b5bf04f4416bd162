// Events: points of streams, or of captures.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "captures.h"
#include "scheduler.h"

// Guarded by the scheduler's lock.
struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  std::shared_ptr<standin::Mark> mark;        // or null: never recorded
  std::shared_ptr<standin::Capture> capture;  // in which it was recorded last, or null
  std::vector<cudaGraphNode_t> nodes;         // where in that capture

  bool is_captured() const { return standin::Captures::get().is_active(capture); }

  cudaError_t record(standin::Lock& lock, const std::shared_ptr<standin::Stream>& stream,
                     unsigned record_flags);

  // Makes a stream wait for the event; one that waits for a captured event joins the capture.
  cudaError_t make_wait(standin::Lock& lock, const std::shared_ptr<standin::Stream>& stream,
                        unsigned wait_flags) const;
};
