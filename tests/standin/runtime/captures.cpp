// Keeps the active captures, and decides which calls they forbid.
#include "captures.h"

#include <algorithm>
#include <utility>

#include "errors.h"
#include "standin.h"

namespace standin {
namespace {

// Which captures forbid unsafe calls of this thread; see cudaThreadExchangeStreamCaptureMode().
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

bool forbids_unsafe_calls(const Capture& capture) {
  const bool is_own = capture.thread == std::this_thread::get_id();
  switch (mode_of_thread) {
    case cudaStreamCaptureModeGlobal:
      return capture.mode == cudaStreamCaptureModeGlobal ||
             (is_own && capture.mode == cudaStreamCaptureModeThreadLocal);
    case cudaStreamCaptureModeThreadLocal:
      return is_own && capture.mode != cudaStreamCaptureModeRelaxed;
    default:
      return false;
  }
}

}  // namespace

void Frontier::add(const std::vector<cudaGraphNode_t>& more) {
  for (auto* const node : more) {
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) {
      nodes.push_back(node);
    }
  }
  edges.assign(nodes.size(), cudaGraphEdgeData{});
}

void Frontier::set(const std::vector<cudaGraphNode_t>& all) {
  nodes.clear();
  add(all);
}

void Capture::add(const std::shared_ptr<Stream>& stream, WorkPointer work) {
  Frontier& frontier = frontiers[stream];
  auto* const node = graph->add(std::move(work), frontier.nodes);
  frontier.set({node});
  nodes.insert(node);
}

bool Capture::has_blocking_stream(int device) const {
  return std::any_of(frontiers.begin(), frontiers.end(), [&](const auto& item) {
    return item.first->is_blocking() && item.first->device == device;
  });
}

cudaGraphNode_t Capture::find_unjoined() const {
  std::set<cudaGraphNode_t> joined;
  std::vector<cudaGraphNode_t> ahead = frontiers.at(origin).nodes;
  while (!ahead.empty()) {
    auto* const node = ahead.back();
    ahead.pop_back();
    if (joined.insert(node).second) {
      ahead.insert(ahead.end(), node->dependencies.begin(), node->dependencies.end());
    }
  }
  const auto found = std::find_if(nodes.begin(), nodes.end(),
                                  [&](cudaGraphNode_t node) { return joined.count(node) == 0; });
  return found == nodes.end() ? nullptr : *found;
}

Captures& Captures::get() {
  static Captures* const value = new Captures;
  return *value;
}

std::shared_ptr<Capture> Captures::begin(const std::shared_ptr<Stream>& stream,
                                         cudaStreamCaptureMode mode) {
  auto capture = std::make_shared<Capture>();
  capture->id = ++last_id_;
  capture->mode = mode;
  capture->origin = stream;
  capture->thread = std::this_thread::get_id();
  capture->frontiers[stream];
  stream->capture = capture;
  active_.insert(capture);
  return capture;
}

void Captures::end(const std::shared_ptr<Capture>& capture) {
  active_.erase(capture);
  for (auto& [stream, frontier] : capture->frontiers) {
    stream->capture = nullptr;
  }
}

cudaError_t refuse(Capture& capture, cudaError_t error, const std::string& words) {
  capture.is_invalid = true;
  return fail(error, words);
}

cudaError_t refuse_if_capturing(const Stream& stream, const char* name) {
  if (stream.capture == nullptr) {
    return cudaSuccess;
  }
  return refuse(*stream.capture, cudaErrorStreamCaptureUnsupported,
                std::string(name) + " of a stream that is capturing");
}

cudaError_t refuse_if_implicit(const Stream& stream, const char* name) {
  for (const auto& capture : Captures::get().active()) {
    if (stream.is_legacy && capture->has_blocking_stream(stream.device)) {
      return refuse(*capture, cudaErrorStreamCaptureImplicit,
                    std::string(name) +
                        " in the legacy stream while a stream is capturing that it waits for");
    }
  }
  return cudaSuccess;
}

cudaError_t refuse_if_unsafe(const char* name) {
  const Lock lock = Scheduler::get().lock();
  cudaError_t error = cudaSuccess;
  for (const auto& capture : Captures::get().active()) {
    if (forbids_unsafe_calls(*capture)) {
      error = refuse(*capture, cudaErrorStreamCaptureUnsupported,
                     std::string(name) + " while a stream is capturing");
    }
  }
  return error;
}

}  // namespace standin

STANDIN_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, standin::mode_of_thread);
  return cudaSuccess;
}
