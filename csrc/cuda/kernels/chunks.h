// The rows of a matrix, or the vectors of a channel, in chunks: as many as the threads of a block
// have in flight. The blocks of a tile take the chunks in turn. At any time they work on one short
// range of addresses, which DRAM serves faster than many ranges, and a chunk begins at a multiple
// of its size: fewer cache lines are read or written by two blocks.
//
// Reductions go upwards, element-wise kernels downwards: the reduction before has read the end
// last, so the L2 cache may still hold it.
#pragma once

#include "device.h"
#include "plan.h"

namespace syncbn::cuda {

// Chunks as kernels see them.
struct Chunks {
  int size;  // rows or vectors
  int number;
  int last_size;  // of the chunk at the end

  Chunks(int64_t length, int size)
      : size(size),
        number(static_cast<int>(ceil_div(length, size))),
        last_size(static_cast<int>(length - int64_t{number - 1} * size)) {}
};

// The walk of a block over its chunks; a thread without values has none.
template <Direction kDirection>
class ChunkWalk {
 public:
  __device__ __forceinline__ ChunkWalk(const Chunks& chunks, bool has_values)
      : chunks_(chunks), turn_(has_values ? static_cast<int>(blockIdx.y) : chunks.number) {}

  __device__ __forceinline__ bool has_chunk() const { return turn_ < chunks_.number; }
  // The chunk's first row or vector.
  __device__ __forceinline__ int64_t first() const {
    const int chunk = kDirection == Direction::kUp ? turn_ : chunks_.number - 1 - turn_;
    return int64_t{chunk} * chunks_.size;
  }
  // The chunk's number of rows or vectors from `at` on; without a chunk not positive.
  __device__ __forceinline__ int left(int at) const {
    const int last_turn = kDirection == Direction::kUp ? chunks_.number - 1 : 0;
    return (!has_chunk() ? 0 : turn_ == last_turn ? chunks_.last_size : chunks_.size) - at;
  }
  __device__ __forceinline__ void advance() { turn_ += static_cast<int>(gridDim.y); }

 private:
  const Chunks& chunks_;
  int turn_;
};

}  // namespace syncbn::cuda
