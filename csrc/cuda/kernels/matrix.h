// A row-major matrix (rows, C): a thread owns kVector columns of every blockDim.y-th row of its
// block's segment; see plan.h.
#pragma once

#include "plan.h"
#include "vector.h"

namespace syncbn::cuda {

// A plan as kernels see it.
struct Matrix {
  int64_t rows;
  int64_t channels;
  int64_t tile_channels;
  int64_t segment;

  explicit Matrix(const Plan& plan)
      : rows(plan.geometry.outer),
        channels(plan.geometry.channels),
        tile_channels(plan.tile_channels),
        segment(plan.segment) {}

  // The first channel of this thread; those of the last tile's last threads do not exist.
  template <int kVector>
  __device__ __forceinline__ int64_t channel() const {
    return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
  }
  __device__ __forceinline__ int64_t first_row() const { return blockIdx.y * segment; }
  // Rows of this block.
  __device__ __forceinline__ int num_rows() const {
    const int64_t left = rows - first_row();
    return static_cast<int>(left < segment ? left : segment);
  }
};

}  // namespace syncbn::cuda
