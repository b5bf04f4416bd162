// The plan by which a tensor is split over blocks and threads. It depends on the tensor's geometry,
// dtype and alignment and on the number of multiprocessors, never on data: results are the same
// bits on each run.
//
// A block owns a tile of channels and a segment of their values.
//
// Matrix (rows, columns): a thread owns `vector` neighboring columns, blockDim.x threads make a
// tile of whole channels, blockDim.y threads share its rows; the segment counts rows. Columns are
// channels, or the values of small planes (outer, C * inner): a plane alone would have narrow or
// unaligned vectors, a few together have whole ones.
//
// Planar (outer, C, inner): blockDim.x threads share a channel, blockDim.y channels are a tile; the
// segment counts slots, aligned vectors that a plane lies in. In an unaligned plane the first and
// the last slot hold values of neighboring planes, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>

#include "../../common/dtype.h"
#include "../../common/geometry.h"
#include "../../common/host_device.h"

namespace syncbn::cuda {

constexpr int kMaxThreads = 256;  // in a block
constexpr int kVectorBytes = 16;
constexpr int kWarp = 32;
// Bytes of a row of a matrix that a block reads, about: a line of the cache.
constexpr int kRowBytes = 128;
// Bytes of partial sums that the last block of a tile reads, at the speed of one multiprocessor.
// Where they would be more, tiles are narrower, down to about a sector of a line.
constexpr int64_t kMostPartialBytes = 96 * 1024;
constexpr int kLeastRowBytes = 32;

// Vectors that a thread has in flight, of all tensors: 64 KB in a multiprocessor.
constexpr int kUnroll = 8;
// Rows of a matrix that a thread has in flight, whose vectors may be narrow: as many bytes, in at
// most 16 loads. With 24 loads sm_100 and sm_120 spill.
SYNCBN_HOST_DEVICE constexpr int rows_in_flight(int vector_bytes) {
  const int rows = kUnroll * kVectorBytes / vector_bytes;
  return rows < 16 ? rows : 16;
}
// Blocks of a multiprocessor: all are resident, so that no last wave is half empty where tensors
// are large. The same for all kernels, so that one goes through the segments of the one before it.
constexpr int kBlocks = 2;

// Partial sums of a channel that a thread has in flight, of both kinds.
constexpr int kPartialLoads = 8;

// Columns of a matrix in a block, at most: the terms of its channels' sums.
constexpr int kMaxTerms = 512;

// Values of a channel, or of a column of a matrix, in a block: a float counts them exactly, and 32
// bits index them.
constexpr int64_t kLongestSegment = 1 << 24;

struct Plan {
  Geometry geometry;
  DType dtype;
  bool is_matrix;          // also of small planes, whose geometry is planar
  int vector;              // values that a thread loads at once
  bool aligned;            // false: planar, with values of other planes in first and last slots
  int64_t slots_in_plane;  // planar
  int block_x;
  int block_y;
  int64_t tile_channels;
  int64_t tiles;    // gridDim.x
  int64_t splits;   // gridDim.y
  int64_t segment;  // rows (matrix) or slots (planar) of a block

  // Doubles of workspace: two sums for each channel and block. None where a block has all values.
  int64_t num_partials() const { return splits == 1 ? 0 : 2 * splits * geometry.channels; }
  int64_t num_counters() const { return splits == 1 ? 0 : tiles; }
};

// Returns how many of a block's threads add up `number` sums of each of `channels`: a power of two,
// so many that each has all its loads in flight at once, or as many as there are.
SYNCBN_HOST_DEVICE inline int num_readers(int threads, int channels, int number) {
  int readers = 1;
  while (kPartialLoads * readers < number && 2 * readers * channels <= threads) {
    readers *= 2;
  }
  return readers;
}

namespace detail {

// Returns the mean share of the resident blocks' places that are taken.
inline double busy_share(int64_t blocks, int64_t resident) {
  const auto waves = static_cast<double>(ceil_div(blocks, resident));
  return static_cast<double>(blocks) / (waves * static_cast<double>(resident));
}

// Splits `length` so that the blocks of all tiles fill what is resident at once or, where there are
// many tiles, leave at most a tenth of the waves empty, or as little as eight times the splits can;
// into segments of `shortest` to `longest`.
inline void split_segments(Plan& plan, int64_t length, int64_t shortest, int64_t longest,
                           int64_t resident) {
  const int64_t most = std::max<int64_t>(1, ceil_div(length, shortest));
  const int64_t least = std::max<int64_t>(1, ceil_div(length, longest));
  const int64_t one_wave = std::max<int64_t>(1, resident / plan.tiles);
  int64_t wanted = one_wave;
  for (int64_t splits = one_wave; splits <= std::min(8 * one_wave, most); ++splits) {
    if (busy_share(plan.tiles * wanted, resident) >= 0.9) {
      break;
    }
    if (busy_share(plan.tiles * splits, resident) > busy_share(plan.tiles * wanted, resident)) {
      wanted = splits;
    }
  }
  wanted = std::max(least, std::min(wanted, most));
  plan.segment = std::max<int64_t>(1, ceil_div(length, wanted));
  plan.splits = std::max<int64_t>(1, ceil_div(length, plan.segment));
}

inline int next_power_of_two(int64_t value, int lowest, int highest) {
  int power = lowest;
  while (power < value && power < highest) {
    power *= 2;
  }
  return power;
}

// The widest vectors of whole columns.
inline int columns_at_once(int64_t columns, DType dtype, int alignment) {
  for (const int bytes : {kVectorBytes, 4}) {
    const int vector = bytes / size_of(dtype);
    if (vector > 1 && columns % vector == 0 && alignment % bytes == 0) {
      return vector;
    }
  }
  return 1;
}

// Channels whose planes together have whole vectors.
inline int64_t channels_of_vectors(int64_t inner, int vector) {
  return vector / std::gcd(inner, int64_t{vector});
}

inline void plan_matrix(Plan& plan, int alignment, int64_t resident) {
  const int64_t inner = plan.geometry.inner;
  const int64_t columns = plan.geometry.channels * inner;
  plan.is_matrix = true;
  plan.aligned = true;
  plan.vector = columns_at_once(columns, plan.dtype, alignment);
  const int64_t group = channels_of_vectors(inner, plan.vector);
  const int64_t group_vectors = group * inner / plan.vector;
  const int64_t groups = ceil_div(plan.geometry.channels, group);
  const int vector_bytes = plan.vector * size_of(plan.dtype);
  const int rows = rows_in_flight(vector_bytes);
  const auto lay_out = [&](int64_t row_vectors) {
    plan.tiles = ceil_div(groups, ceil_div(row_vectors, group_vectors));
    const int64_t tile_groups = ceil_div(groups, plan.tiles);
    plan.block_x = static_cast<int>(tile_groups * group_vectors);
    plan.block_y = kMaxThreads / plan.block_x;
    plan.tile_channels = tile_groups * group;
    split_segments(plan, plan.geometry.outer, plan.block_y * rows, kLongestSegment, resident);
  };
  lay_out(std::min(kWarp, kRowBytes / vector_bytes));
  while (plan.num_partials() * size_of(DType::kDouble) > kMostPartialBytes * plan.tiles &&
         plan.block_x * vector_bytes >= 2 * kLeastRowBytes && plan.block_x > group_vectors) {
    lay_out(plan.block_x / 2);
  }
  // Wide tiles rather than threads without rows, as long as there is a tile for each block.
  while (plan.geometry.outer < plan.block_y && 2 * plan.block_x * plan.vector <= kMaxTerms &&
         2 * plan.tile_channels <= kMaxThreads && plan.tiles >= 2 * resident) {
    lay_out(2 * plan.block_x);
  }
}

// Returns whether planes are so small that a few of them make the columns of a tile.
inline bool are_columns(const Geometry& geometry, int widest, int alignment) {
  const int64_t columns = channels_of_vectors(geometry.inner, widest) * geometry.inner;
  return columns <= kMaxTerms && geometry.channels * geometry.inner % widest == 0 &&
         alignment % kVectorBytes == 0;
}

inline void plan_planar(Plan& plan, int alignment, bool same_phase, int64_t resident) {
  const int64_t channels = plan.geometry.channels;
  const int64_t inner = plan.geometry.inner;
  const int widest = kVectorBytes / size_of(plan.dtype);
  plan.aligned = true;
  plan.vector = widest;
  const bool has_vectors = inner % widest == 0 && alignment % kVectorBytes == 0;
  // Of planes of a vector or three, a warp would read a part of many lines.
  const bool is_tiny = inner * size_of(plan.dtype) < kRowBytes / 2;
  if ((is_tiny || !has_vectors) && are_columns(plan.geometry, widest, alignment)) {
    return plan_matrix(plan, alignment, resident);
  }
  if (has_vectors) {
    plan.slots_in_plane = inner / widest;
  } else if (inner >= 2 * widest && same_phase) {
    plan.aligned = false;
    plan.slots_in_plane = (inner + 2 * widest - 2) / widest;  // wherever the plane begins
  } else {
    plan.vector = 1;
    plan.slots_in_plane = inner;
  }
  const int64_t slots = plan.geometry.outer * plan.slots_in_plane;
  plan.block_x = next_power_of_two(ceil_div(slots, kUnroll), kWarp, kMaxThreads);
  // Several channels in a block rather than several waves of blocks, each of which loads little.
  const auto fills_a_wave = [&](int block_x) {
    return 10 * ceil_div(channels, kMaxThreads / block_x) >= 9 * resident;
  };
  while (plan.block_x > kWarp && fills_a_wave(plan.block_x / 2)) {
    plan.block_x /= 2;
  }
  plan.block_y = next_power_of_two(channels, 1, kMaxThreads / plan.block_x);
  plan.tile_channels = plan.block_y;
  plan.tiles = ceil_div(channels, plan.block_y);
  split_segments(plan, slots, plan.block_x * kUnroll, kLongestSegment / plan.vector, resident);
}

}  // namespace detail

// `pointers` are all tensors of the input's shape that the pass reads and writes, null for those
// that are not there.
inline Plan make_plan(const Geometry& geometry, DType dtype,
                      std::initializer_list<const void*> pointers, int multiprocessors) {
  Plan plan{};
  plan.geometry = geometry;
  plan.dtype = dtype;
  int alignment = kVectorBytes;  // a power of two that divides every address
  bool same_phase = true;
  for (const void* pointer : pointers) {
    if (pointer == nullptr) {
      continue;
    }
    const auto phase = reinterpret_cast<uintptr_t>(pointer) % kVectorBytes;
    while (phase % alignment != 0) {
      alignment /= 2;
    }
    same_phase &= phase == reinterpret_cast<uintptr_t>(*pointers.begin()) % kVectorBytes;
  }
  const int64_t resident = int64_t{multiprocessors} * kBlocks;
  if (geometry.is_matrix()) {
    detail::plan_matrix(plan, alignment, resident);
  } else {
    detail::plan_planar(plan, alignment, same_phase, resident);
  }
  return plan;
}

}  // namespace syncbn::cuda
