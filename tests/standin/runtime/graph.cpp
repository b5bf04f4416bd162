// Builds graphs and finds the order in which their launches run the work.
#include "graph.h"

#include <algorithm>
#include <queue>
#include <utility>

cudaGraphNode_t CUgraph_st::add(standin::WorkPointer work,
                                std::vector<cudaGraphNode_t> dependencies) {
  auto node = std::make_unique<CUgraphNode_st>();
  node->graph = this;
  node->number = nodes.size();
  node->work = std::move(work);
  node->dependencies = std::move(dependencies);
  nodes.push_back(std::move(node));
  return nodes.back().get();
}

namespace standin {

void Program::run() {
  const std::lock_guard<std::mutex> lock(running);
  for (const WorkPointer& work : steps) {
    work->run();
  }
}

std::vector<WorkPointer> reordered_work(const CUgraph_st& graph) {
  const size_t num_nodes = graph.nodes.size();
  std::vector<size_t> num_missing(num_nodes);
  std::vector<std::vector<size_t>> successors(num_nodes);
  std::priority_queue<size_t> ready;
  for (const auto& node : graph.nodes) {
    num_missing[node->number] = node->dependencies.size();
    for (auto* const dependency : node->dependencies) {
      successors[dependency->number].push_back(node->number);
    }
    if (node->dependencies.empty()) {
      ready.push(node->number);
    }
  }
  std::vector<WorkPointer> order;
  while (!ready.empty()) {
    const size_t number = ready.top();
    ready.pop();
    if (graph.nodes[number]->work != nullptr) {
      order.push_back(graph.nodes[number]->work);
    }
    for (const size_t successor : successors[number]) {
      if (--num_missing[successor] == 0) {
        ready.push(successor);
      }
    }
  }
  return order;
}

}  // namespace standin
