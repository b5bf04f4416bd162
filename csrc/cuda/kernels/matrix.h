// A row-major matrix (rows, columns): a thread owns kVector columns of every blockDim.y-th row of
// its block's chunks; see plan.h. A channel has one column, or a column for each value of a plane.
#pragma once

#include "chunks.h"
#include "plan.h"
#include "vector.h"

namespace syncbn::cuda {

// A plan as kernels see it.
struct Matrix {
  int64_t columns;
  int64_t channels;
  int64_t tile_channels;
  Chunks chunks;   // of rows
  int64_t stride;  // from a chunk to the block's next, in values
  unsigned columns_of_channel;
  unsigned readers;         // threads that merge a channel's states
  unsigned reader_members;  // `readers` states: members,
  unsigned reader_columns;  // and columns

  // A thread has `steps` rows of a chunk.
  Matrix(const Plan& plan, int steps)
      : columns(plan.geometry.channels * plan.geometry.inner),
        channels(plan.geometry.channels),
        tile_channels(plan.tile_channels),
        chunks(plan.geometry.outer, steps * plan.block_y),
        stride(plan.splits * chunks.size * columns),
        columns_of_channel(static_cast<unsigned>(plan.geometry.inner)),
        readers(plan.num_readers()),
        reader_members(readers / columns_of_channel),
        reader_columns(readers % columns_of_channel) {}

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
    unsigned channel = tile_column<kVector>();
    unsigned rest = 0;
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
};

// A walk over the states that this thread reads when the threads' states of a tile are merged. The
// states of a tile lie in shared memory, [member][tile_columns]; each of a channel's `readers`
// threads reads every readers-th state of its columns.
class StateWalk {
 public:
  __device__ __forceinline__ StateWalk(const Matrix& matrix, unsigned tile_columns)
      : matrix_(matrix), tile_columns_(tile_columns) {
    const auto channels = static_cast<unsigned>(matrix.tile_channels);
    const unsigned reader = static_cast<unsigned>(thread_index()) / channels;
    const unsigned channel = thread_index() - reader * channels;
    const unsigned member = reader / matrix.columns_of_channel;
    is_reader_ = reader < matrix.readers;
    term_ = channel * matrix.readers + reader;
    first_column_ = channel * matrix.columns_of_channel;
    column_ = reader - member * matrix.columns_of_channel;
    place_ = member * tile_columns + first_column_ + column_;
    end_ = is_reader_ ? blockDim.y * tile_columns : 0;
  }

  __device__ __forceinline__ bool is_reader() const { return is_reader_; }
  __device__ __forceinline__ bool has_state() const { return place_ < end_; }
  // The place of the state.
  __device__ __forceinline__ unsigned place() const { return place_; }
  // Of its channel.
  __device__ __forceinline__ unsigned first_column() const { return first_column_; }
  __device__ __forceinline__ unsigned column() const { return first_column_ + column_; }
  __device__ __forceinline__ void advance() {
    place_ += matrix_.reader_members * tile_columns_ + matrix_.reader_columns;
    column_ += matrix_.reader_columns;
    if (column_ >= matrix_.columns_of_channel) {
      column_ -= matrix_.columns_of_channel;
      place_ += tile_columns_ - matrix_.columns_of_channel;
    }
  }
  // The place of this thread's merged state among the terms of the tile.
  __device__ __forceinline__ unsigned term() const { return term_; }

 private:
  const Matrix& matrix_;
  unsigned tile_columns_;
  bool is_reader_;
  unsigned term_;
  unsigned first_column_;
  unsigned column_;
  unsigned place_;
  unsigned end_;
};

}  // namespace syncbn::cuda
