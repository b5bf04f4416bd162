// CUDA's functions that begin and end captures, and that get and set the dependencies of a stream's
// next node. torch's allocator gets them to find out when memory can be reused.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "captures.h"
#include "errors.h"
#include "standin.h"
#include "streams.h"

namespace standin {
namespace {

// `graph` is null for a new one.
cudaError_t begin_capture(cudaStream_t handle, cudaStreamCaptureMode mode, cudaGraph_t graph,
                          const std::vector<cudaGraphNode_t>& dependencies) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr) {
    return refuse_stream("cudaStreamBeginCapture");
  }
  if (stream->is_legacy) {
    return fail(cudaErrorStreamCaptureUnsupported, "capture of the legacy stream");
  }
  if (stream->capture != nullptr) {
    return fail(cudaErrorIllegalState, "cudaStreamBeginCapture of a stream that is capturing");
  }
  const auto capture = Captures::get().begin(stream, mode);
  capture->owns_graph = graph == nullptr;
  capture->graph = graph == nullptr ? new CUgraph_st : graph;
  capture->frontiers[stream].set(dependencies);
  return cudaSuccess;
}

cudaError_t check_end(const Stream& stream, const Capture& capture) {
  if (capture.origin.get() != &stream) {
    return fail(cudaErrorStreamCaptureUnmatched,
                "cudaStreamEndCapture of another stream than the one where the capture began");
  }
  if (capture.thread != std::this_thread::get_id() &&
      capture.mode != cudaStreamCaptureModeRelaxed) {
    return fail(cudaErrorStreamCaptureWrongThread,
                "cudaStreamEndCapture in another thread than the one where the capture began");
  }
  return cudaSuccess;
}

cudaError_t check_result(const Capture& capture) {
  if (capture.is_invalid) {
    return fail(cudaErrorStreamCaptureInvalidated);
  }
  if (auto* const node = capture.find_unjoined()) {
    const std::string name = node->work == nullptr ? "an empty node" : node->work->name();
    return fail(cudaErrorStreamCaptureUnjoined, "captured work was not joined: " + name);
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace standin

using namespace standin;

STANDIN_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return begin_capture(stream, mode, nullptr, {});
}

STANDIN_API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                                      const cudaGraphNode_t* dependencies,
                                                      const cudaGraphEdgeData*, size_t number,
                                                      cudaStreamCaptureMode mode) {
  return begin_capture(stream, mode, graph, {dependencies, dependencies + number});
}

STANDIN_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  *graph = nullptr;
  std::unique_ptr<CUgraph_st> dropped;  // without the lock
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  const auto capture = stream == nullptr ? nullptr : stream->capture;
  if (capture == nullptr) {
    return fail(cudaErrorIllegalState, "cudaStreamEndCapture of a stream that is not capturing");
  }
  if (const cudaError_t error = check_end(*stream, *capture)) {
    capture->is_invalid = true;
    return error;
  }
  Captures::get().end(capture);
  if (const cudaError_t error = check_result(*capture)) {
    if (capture->owns_graph) {
      dropped.reset(capture->graph);
    }
    return error;
  }
  *graph = capture->graph;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                              cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

STANDIN_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                                 cudaStreamCaptureStatus* status,
                                                 unsigned long long* id, cudaGraph_t* graph,
                                                 const cudaGraphNode_t** dependencies,
                                                 const cudaGraphEdgeData** edges, size_t* number) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  if (stream == nullptr) {
    return refuse_stream("cudaStreamGetCaptureInfo");
  }
  const auto& capture = stream->capture;
  if (capture == nullptr || capture->is_invalid) {
    *status = capture == nullptr ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
  }
  *status = cudaStreamCaptureStatusActive;
  const Frontier& frontier = capture->frontiers[stream];
  if (id != nullptr) *id = capture->id;
  if (graph != nullptr) *graph = capture->graph;
  if (dependencies != nullptr) *dependencies = frontier.nodes.data();
  if (edges != nullptr) *edges = frontier.edges.data();
  if (number != nullptr) *number = frontier.nodes.size();
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle,
                                                            cudaGraphNode_t* dependencies,
                                                            const cudaGraphEdgeData*, size_t number,
                                                            unsigned flags) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  const auto capture = stream == nullptr ? nullptr : stream->capture;
  if (capture == nullptr || capture->is_invalid) {
    return fail(cudaErrorIllegalState,
                "cudaStreamUpdateCaptureDependencies of a stream that is not capturing");
  }
  const std::vector<cudaGraphNode_t> nodes(dependencies, dependencies + number);
  const bool are_of_graph = std::all_of(nodes.begin(), nodes.end(), [&](cudaGraphNode_t node) {
    return node->graph == capture->graph;
  });
  if (!are_of_graph) {
    return fail(cudaErrorInvalidValue,
                "cudaStreamUpdateCaptureDependencies with a node of another graph");
  }
  Frontier& frontier = capture->frontiers[stream];
  if (flags == cudaStreamSetCaptureDependencies) {
    for (auto* const node : frontier.nodes) {  // need not be joined any more
      capture->nodes.erase(node);
    }
    frontier.set(nodes);
  } else {
    frontier.add(nodes);
  }
  return cudaSuccess;
}

STANDIN_API bool standin_is_capturing(cudaStream_t handle) {
  const Lock lock = Scheduler::get().lock();
  const auto stream = Streams::get().find(handle);
  return stream != nullptr && stream->capture != nullptr;
}
