// Captures: streams whose work goes into a graph instead of being run.
//
// A capture begins in one stream; others join it by waiting for an event that was recorded in it.
// Calls that a GPU refuses during a capture are refused here, and invalidate the capture.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "graph.h"
#include "scheduler.h"
#include "stream.h"

namespace standin {

// The nodes that the next one of a stream depends on.
struct Frontier {
  std::vector<cudaGraphNode_t> nodes;
  std::vector<cudaGraphEdgeData> edges;  // plain edges, for queries

  void add(const std::vector<cudaGraphNode_t>& more);
  void set(const std::vector<cudaGraphNode_t>& all);
};

// Guarded by the scheduler's lock.
struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::shared_ptr<Stream> origin;
  std::thread::id thread;
  cudaGraph_t graph = nullptr;
  bool owns_graph = true;  // or the caller of cudaStreamBeginCaptureToGraph() does
  bool is_invalid = false;
  std::map<std::shared_ptr<Stream>, Frontier> frontiers;
  std::set<cudaGraphNode_t> nodes;  // all must be joined when the capture ends

  void add(const std::shared_ptr<Stream>& stream, WorkPointer work);
  bool has_blocking_stream(int device) const;

  // Returns a node that the origin's frontier does not depend on, or null.
  cudaGraphNode_t find_unjoined() const;
};

// Requires the scheduler's lock.
class Captures {
 public:
  static Captures& get();

  std::shared_ptr<Capture> begin(const std::shared_ptr<Stream>& stream, cudaStreamCaptureMode mode);
  void end(const std::shared_ptr<Capture>& capture);
  bool is_active(const std::shared_ptr<Capture>& capture) const {
    return active_.count(capture) != 0;
  }
  const std::set<std::shared_ptr<Capture>>& active() const { return active_; }

 private:
  std::set<std::shared_ptr<Capture>> active_;
  unsigned long long last_id_ = 0;
};

// Invalidates the capture and fails.
cudaError_t refuse(Capture& capture, cudaError_t error, const std::string& words);

// Refuses a call on a stream that captures.
cudaError_t refuse_if_capturing(const Stream& stream, const char* name);

// Refuses work of the legacy stream, which would have to wait for a capturing stream.
cudaError_t refuse_if_implicit(const Stream& stream, const char* name);

// Refuses a call that a capture in this or another thread forbids, by the mode of the capture and
// that of this thread. Takes the scheduler's lock.
cudaError_t refuse_if_unsafe(const char* name);

}  // namespace standin
