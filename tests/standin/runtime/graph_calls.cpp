// CUDA's functions for graphs and their nodes, and launches of graphs.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "enqueue.h"
#include "errors.h"
#include "graph.h"
#include "scheduler.h"
#include "standin.h"

using namespace standin;

namespace {

// Copies as many handles as fit, as CUDA's functions do: with null for handles they only count.
void copy_handles(const std::vector<cudaGraphNode_t>& from, cudaGraphNode_t* to, size_t* number) {
  if (to == nullptr) {
    *number = from.size();
    return;
  }
  for (size_t i = 0; i < *number; ++i) {
    to[i] = i < from.size() ? from[i] : nullptr;
  }
  *number = std::min(*number, from.size());
}

}  // namespace

STANDIN_API cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  *graph = new CUgraph_st;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes,
                                          size_t* number) {
  const Lock lock = Scheduler::get().lock();
  std::vector<cudaGraphNode_t> all;
  for (const auto& node : graph->nodes) {
    all.push_back(node.get());
  }
  copy_handles(all, nodes, number);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node,
                                                     cudaGraphNode_t* dependencies,
                                                     cudaGraphEdgeData* edges, size_t* number) {
  const Lock lock = Scheduler::get().lock();
  copy_handles(node->dependencies, dependencies, number);
  if (edges != nullptr) {
    std::fill(edges, edges + *number, cudaGraphEdgeData{});
  }
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                              const cudaGraphNode_t* dependencies, size_t number) {
  const Lock lock = Scheduler::get().lock();
  *node = graph->add(nullptr, {dependencies, dependencies + number});
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                         const cudaGraphNode_t* dependencies,
                                         const cudaGraphEdgeData*, size_t number,
                                         cudaGraphNodeParams* parameters) {
  if (parameters->type != cudaGraphNodeTypeEmpty) {
    return fail(cudaErrorNotSupported,
                "cudaGraphAddNode of a node of type " + std::to_string(parameters->type));
  }
  return cudaGraphAddEmptyNode(node, graph, dependencies, number);
}

STANDIN_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char* path, unsigned) {
  std::FILE* const file = std::fopen(path, "w");
  if (file == nullptr) {
    return fail(cudaErrorInvalidValue, std::string("cannot write ") + path);
  }
  const Lock lock = Scheduler::get().lock();
  std::fprintf(file, "digraph graph_of_the_standin {\n");
  for (const auto& node : graph->nodes) {
    const char* name = node->work == nullptr ? "empty" : node->work->name();
    std::fprintf(file, "  n%zu [label=\"%s\"];\n", node->number, name);
    for (auto* const dependency : node->dependencies) {
      std::fprintf(file, "  n%zu -> n%zu;\n", dependency->number, node->number);
    }
  }
  std::fprintf(file, "}\n");
  std::fclose(file);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                                      unsigned long long) {
  const Lock lock = Scheduler::get().lock();
  auto program = std::make_shared<Program>();
  program->steps = reordered_work(*graph);
  for (const auto& [object, count] : graph->objects) {
    object->num_references += count;
  }
  *exec = new CUgraphExec_st{program, graph->objects};
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                             unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(exec, graph, flags);
}

// The log shows each kernel of the graph, as a profiler would.
STANDIN_API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const auto program = exec->program;
  const bool is_captured = standin_is_capturing(stream);
  const auto work = make_work("graph", "cudaGraphLaunch", [program] { program->run(); });
  if (!is_captured) {
    for (const WorkPointer& step : program->steps) {
      step->log();
    }
  }
  return enqueue(stream, work);
}

STANDIN_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  for (const auto& [object, count] : graph->objects) {
    release_object(object, count);
  }
  delete graph;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  for (const auto& [object, count] : exec->objects) {
    release_object(object, count);
  }
  delete exec;
  return cudaSuccess;
}
