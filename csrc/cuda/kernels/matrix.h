// A row-major matrix (rows, columns): a thread owns kVector columns of every blockDim.y-th row of
// its block's segment; see plan.h. A channel has one column, or a column for each value of a plane.
#pragma once

#include "plan.h"
#include "vector.h"

namespace syncbn::cuda {

// A plan as kernels see it.
struct Matrix {
  int64_t rows;
  int64_t columns;
  int64_t channels;
  int64_t tile_channels;
  int64_t segment;
  int columns_of_channel;

  explicit Matrix(const Plan& plan)
      : rows(plan.geometry.outer),
        columns(plan.geometry.channels * plan.geometry.inner),
        channels(plan.geometry.channels),
        tile_channels(plan.tile_channels),
        segment(plan.segment),
        columns_of_channel(static_cast<int>(plan.geometry.inner)) {}

  // The first column of this thread, in its tile and in the matrix. Columns of the last tile's last
  // threads may be past the matrix.
  template <int kVector>
  __device__ __forceinline__ int tile_column() const {
    return threadIdx.x * kVector;
  }
  template <int kVector>
  __device__ __forceinline__ int64_t column() const {
    return blockIdx.x * tile_channels * columns_of_channel + tile_column<kVector>();
  }
  // Calls function(v, channel of the tile) for each of this thread's columns v.
  template <int kVector, typename Function>
  __device__ __forceinline__ void for_each_column(const Function& function) const {
    int channel = tile_column<kVector>();
    int rest = 0;
    if (columns_of_channel > 1) {
      rest = channel % columns_of_channel;
      channel /= columns_of_channel;
    }
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      function(v, channel);
      if (++rest == columns_of_channel) {
        rest = 0;
        ++channel;
      }
    }
  }
  __device__ __forceinline__ int64_t first_row() const { return blockIdx.y * segment; }
  __device__ __forceinline__ int num_rows() const {
    const int64_t left = rows - first_row();
    return static_cast<int>(left < segment ? left : segment);
  }
};

}  // namespace syncbn::cuda
