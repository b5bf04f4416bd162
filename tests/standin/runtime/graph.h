// Graphs: captured work with its dependencies, and executable graphs made from them.
//
// Nodes stay where they are, since their addresses are CUDA's handles of them. An executable graph
// has its own list of the work and does not need the graph any more.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "work.h"

// An object of the user with a destructor, which graphs keep alive.
struct CUuserObject_st {
  void* object;
  cudaHostFn_t destroy;
  unsigned num_references;
};

struct CUgraphNode_st {
  const CUgraph_st* graph;
  size_t number;              // its place in the graph, after its dependencies
  standin::WorkPointer work;  // or null: an empty node
  std::vector<cudaGraphNode_t> dependencies;
};

// Guarded by the scheduler's lock.
struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
  std::map<cudaUserObject_t, unsigned> objects;  // references to each

  cudaGraphNode_t add(standin::WorkPointer work, std::vector<cudaGraphNode_t> dependencies);
};

namespace standin {

// The work of an executable graph, in the order in which launches run it.
struct Program {
  std::vector<WorkPointer> steps;
  std::mutex running;  // launches of one executable graph do not run at the same time

  void run();
};

// Returns an order that the dependencies permit. Of the nodes that could be next, the one captured
// last is, so that the order differs from the order of capture.
std::vector<WorkPointer> reordered_work(const CUgraph_st& graph);

// Gives references of an object back and destroys it with the last one. To be called without locks.
void release_object(cudaUserObject_t object, unsigned count);

}  // namespace standin

struct CUgraphExec_st {
  std::shared_ptr<standin::Program> program;
  std::map<cudaUserObject_t, unsigned> objects;
};
