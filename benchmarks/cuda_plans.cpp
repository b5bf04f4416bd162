// The CUDA kernels' plan for a tensor, for ctypes.

#include <algorithm>
#include <iterator>

#include "../csrc/cuda/kernels/plan.h"

using namespace syncbn;
using namespace syncbn::cuda;

// Writes the fields of class Plan in cuda_plans.py for an aligned tensor. Returns false if the
// tensor is neither contiguous nor channels-last.
extern "C" bool find_plan(const int64_t* sizes, const int64_t* strides, int64_t dim, int dtype,
                          int multiprocessors, int64_t* fields) {
  const auto geometry = find_geometry(sizes, strides, dim);
  if (!geometry.has_value()) {
    return false;
  }
  const Plan plan = make_plan(*geometry, static_cast<DType>(dtype), {nullptr}, multiprocessors);
  const bool matrix = plan.is_matrix;
  const auto channels = static_cast<int>(std::min(plan.tile_channels, geometry->channels));
  const int threads = plan.block_x * plan.block_y;
  const int64_t values[] = {matrix,
                            plan.vector,
                            plan.aligned,
                            plan.block_x,
                            plan.block_y,
                            channels,
                            plan.tiles,
                            plan.splits,
                            ceil_div(plan.segment, matrix ? plan.block_y : plan.block_x),
                            matrix ? plan.block_y : plan.block_x,
                            num_reducing_threads(threads, channels, static_cast<int>(plan.splits)),
                            kPartialLoads,
                            matrix ? rows_in_flight(plan.vector * size_of(plan.dtype)) : kUnroll,
                            kBlocks};
  std::copy(std::begin(values), std::end(values), fields);
  return true;
}
