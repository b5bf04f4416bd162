// The CUDA operators on emulated threads, for ctypes: in place of csrc/cuda's adapters.
//
// Each function returns an error message or nullptr. Workspaces are like the adapters', but partial
// sums are NaN; counters must be zero again after each launch.
#pragma once

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/geometry.h"
#include "cuda/kernels/launchers.h"
#include "grid.h"

using namespace syncbn;
using namespace syncbn::cuda;

// Shape, strides and dtype of the input, and how kernels run.
struct Call {
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;
  DType dtype;
  int multiprocessors;
  emulation::Order order;
  bool only_last_block;
};

inline Plan plan_of(const Call& call, const KernelKind& kind,
                    std::initializer_list<const void*> pointers) {
  const auto geometry = find_geometry(call.sizes, call.strides, call.dim);
  if (!geometry.has_value()) {
    throw std::runtime_error("neither contiguous nor channels-last");
  }
  return make_plan(kind, *geometry, call.dtype, pointers, call.multiprocessors);
}

template <typename Function>
const char* run(const Call& call, const Function& function) {
  static std::string message;
  emulation::order = call.order;
  emulation::runs_last_block = call.only_last_block;
  emulation::unwritten = {};
  try {
    function();
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

template <typename Function>
void with_workspace(const Plan& plan, const Function& function) {
  // Arrays of exactly this size: AddressSanitizer finds accesses past them.
  const auto partials = std::make_unique<double[]>(plan.num_partials());
  const auto counters = std::make_unique<unsigned[]>(plan.num_counters());
  std::fill_n(partials.get(), plan.num_partials(), std::nan(""));
  const auto begin = reinterpret_cast<uint64_t>(partials.get());
  emulation::unwritten = {begin, begin + plan.num_partials() * sizeof(double)};
  function(Workspace{partials.get(), counters.get()});
  for (int64_t i = 0; i < plan.num_counters(); ++i) {
    if (counters[i] != 0) {
      throw std::runtime_error("counter " + std::to_string(i) + " is left at " +
                               std::to_string(counters[i]));
    }
  }
}
