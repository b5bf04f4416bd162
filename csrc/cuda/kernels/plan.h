// The plan that splits a tensor over blocks and threads. It depends on the tensor's geometry, dtype
// and alignment and on the number of multiprocessors, never on data: results are the same bits in
// each run.
//
// A block owns a tile of channels and takes its share of their values, in chunks (chunks.h).
//
// Matrix (rows, columns): a thread owns `vector` neighboring columns, blockDim.x threads make a
// tile of whole channels, blockDim.y threads share its rows. Columns are channels, or the values of
// small planes (outer, C * inner): vectors of a single plane would be narrow or unaligned, vectors
// of a few planes are whole.
//
// Planar (outer, C, inner): blockDim.x threads share the aligned vectors of a channel, blockDim.y
// channels are a tile. The first and the last aligned vector of an unaligned plane also hold values
// of neighboring planes.
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
constexpr int kLineBytes = 128;  // of the cache
constexpr int kWarp = 32;
// The last block of a tile reads all partial sums, at the speed of one multiprocessor. Tiles are
// narrower, down to about a sector of a cache line, if the partial sums would have more bytes.
constexpr int64_t kMostPartialBytes = 96 * 1024;
constexpr int kLeastRowBytes = 32;

enum class Direction { kUp, kDown };

// How kernels of one kind split their work. The numbers were chosen by measurements on an H100.
struct KernelKind {
  int blocks;   // of a multiprocessor. All are resident: a large tensor has no half-empty last wave
  int vectors;  // in flight of a thread, of all tensors
  int row_bytes;  // of a matrix's row that a block reads, approximately
  int loads;      // at most, of a thread with narrow vectors: more loads spill registers
  bool has_partials;
  Direction direction;  // of a block's chunks
};
// Threads hold the states of many channels, and fewer blocks have fewer partial sums.
constexpr KernelKind kReduction{2, 8, kLineBytes, 16, true, Direction::kUp};
// More warps hide more latency, and memory is slower if a block reads one line of each row.
constexpr KernelKind kElementwise{3, 4, 4 * kLineBytes, 12, false, Direction::kDown};

// Rows in flight of a thread of a matrix, whose vectors may be narrow: as many bytes, if that does
// not take too many loads.
SYNCBN_HOST_DEVICE constexpr int rows_in_flight(const KernelKind& kind, int vector_bytes) {
  const int rows = kind.vectors * kVectorBytes / vector_bytes;
  return rows < kind.loads ? rows : kind.loads;
}

// States, terms or partial sums that a thread merges at once.
constexpr int kStates = 8;

// The maximum number of a block's columns, but twice as many save a wave of a reduction.
constexpr int kMaxColumns = 512;

// The maximum number of a block's values of a channel or column: a float counts them exactly, and
// 32 bits index them.
constexpr int64_t kLongestShare = 1 << 24;

struct Plan {
  KernelKind kind;
  Geometry geometry;
  DType dtype;
  bool is_matrix;            // also true for small planes, whose geometry is planar
  int vector;                // values that a thread loads at once
  bool aligned;              // false: planes' first and last vectors hold values of other planes
  int64_t vectors_in_plane;  // planar
  int block_x;
  int block_y;
  int64_t tile_channels;
  int64_t tiles;   // gridDim.x
  int64_t splits;  // gridDim.y
  int64_t share;   // the most rows (matrix) or vectors (planar) of a block

  // The number of threads that merge the states of one channel of a matrix, about kStates each.
  int num_readers() const {
    const int64_t states = block_y * geometry.inner;
    return static_cast<int>(std::min(ceil_div(states, kStates), block_x * block_y / tile_channels));
  }
  // Two sums for each channel and block; none if one block has all values.
  int64_t num_partials() const { return splits == 1 ? 0 : 2 * splits * geometry.channels; }
  int64_t num_counters() const { return splits == 1 ? 0 : tiles; }
};

// The logarithm of the number of a block's threads that merge `number` terms of each of `channels`
// channels: threads of one warp, enough to have all loads in flight at once, if complete warps have
// so many threads.
SYNCBN_HOST_DEVICE inline int log_mergers(int threads, int channels, int number) {
  const int in_warps = threads / kWarp * kWarp;
  int log = 0;
  while (kStates << log < number && (channels << log) <= in_warps / 2 && 1 << log < kWarp) {
    ++log;
  }
  return log;
}

namespace detail {

// Returns the mean share of a wave's capacity that blocks use.
inline double busy_share(int64_t blocks, int64_t resident) {
  const auto waves = static_cast<double>(ceil_div(blocks, resident));
  return static_cast<double>(blocks) / (waves * static_cast<double>(resident));
}

// Splits `length` rows or vectors over blocks, each with at least one chunk and at most
// kLongestShare values. The blocks of all tiles fill one wave. With many tiles there are several
// waves, and the splits, at most eight times as many, leave at most a tenth of the waves empty, or
// as little as possible.
inline void split(Plan& plan, int64_t length, int64_t chunk, int64_t longest, int64_t resident) {
  const int64_t chunks = std::max<int64_t>(1, ceil_div(length, chunk));
  const int64_t least = ceil_div(chunks, longest / chunk);
  const int64_t one_wave = std::max<int64_t>(1, resident / plan.tiles);
  int64_t wanted = one_wave;
  for (int64_t splits = one_wave; splits <= std::min(8 * one_wave, chunks); ++splits) {
    if (busy_share(plan.tiles * wanted, resident) >= 0.9) {
      break;
    }
    if (busy_share(plan.tiles * splits, resident) > busy_share(plan.tiles * wanted, resident)) {
      wanted = splits;
    }
  }
  plan.splits = std::max(least, std::min(wanted, chunks));
  plan.share = ceil_div(chunks, plan.splits) * chunk;
}

inline int next_power_of_two(int64_t value, int lowest, int highest) {
  int power = lowest;
  while (power < value && power < highest) {
    power *= 2;
  }
  return power;
}

// Returns the width of the widest aligned vectors of a row.
inline int columns_at_once(int64_t columns, DType dtype, int alignment) {
  for (const int bytes : {kVectorBytes, 4}) {
    const int vector = bytes / size_of(dtype);
    if (vector > 1 && columns % vector == 0 && alignment % bytes == 0) {
      return vector;
    }
  }
  return 1;
}

// Returns the smallest number of channels whose planes together are whole vectors.
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
  const int rows = rows_in_flight(plan.kind, vector_bytes);
  const auto lay_out = [&](int64_t row_vectors) {
    plan.tiles = ceil_div(groups, ceil_div(row_vectors, group_vectors));
    const int64_t tile_groups = ceil_div(groups, plan.tiles);
    plan.block_x = static_cast<int>(tile_groups * group_vectors);
    plan.block_y = kMaxThreads / plan.block_x;
    plan.tile_channels = tile_groups * group;
    split(plan, plan.geometry.outer, plan.block_y * rows, kLongestShare, resident);
  };
  lay_out(std::min(kWarp, plan.kind.row_bytes / vector_bytes));
  while (plan.kind.has_partials &&
         plan.num_partials() * size_of(DType::kDouble) > kMostPartialBytes * plan.tiles &&
         plan.block_x * vector_bytes >= 2 * kLeastRowBytes && plan.block_x > group_vectors) {
    lay_out(plan.block_x / 2);
  }
  const auto can_widen = [&](int64_t most_columns) {
    return 2 * plan.block_x <= kMaxThreads && 2 * plan.block_x * plan.vector <= most_columns &&
           2 * plan.tile_channels <= kMaxThreads;
  };
  // Tiles become wider while threads have no rows and each resident block has a tile.
  while (plan.geometry.outer < plan.block_y && plan.tiles >= 2 * resident &&
         can_widen(kMaxColumns)) {
    lay_out(2 * plan.block_x);
  }
  // One wave of a reduction instead of two: each wave merges states and finishes sums.
  if (plan.kind.has_partials && plan.tiles > resident && plan.tiles <= 2 * resident &&
      can_widen(2 * kMaxColumns)) {
    lay_out(2 * plan.block_x);
  }
}

// Returns whether the columns of a tile can be the values of a few small planes.
inline bool are_columns(const Geometry& geometry, int widest, int alignment) {
  const int64_t columns = channels_of_vectors(geometry.inner, widest) * geometry.inner;
  return columns <= kMaxColumns && geometry.channels * geometry.inner % widest == 0 &&
         alignment % kVectorBytes == 0;
}

inline void plan_planar(Plan& plan, int alignment, bool same_phase, int64_t resident) {
  const int64_t channels = plan.geometry.channels;
  const int64_t inner = plan.geometry.inner;
  const int widest = kVectorBytes / size_of(plan.dtype);
  plan.aligned = true;
  plan.vector = widest;
  const bool has_vectors = inner % widest == 0 && alignment % kVectorBytes == 0;
  // From tiny planes, of one to three vectors, a warp would read a part of many lines.
  const bool is_tiny = inner * size_of(plan.dtype) < kLineBytes / 2;
  if ((is_tiny || !has_vectors) && are_columns(plan.geometry, widest, alignment)) {
    return plan_matrix(plan, alignment, resident);
  }
  if (has_vectors) {
    plan.vectors_in_plane = inner / widest;
  } else if (inner >= 2 * widest && same_phase) {
    plan.aligned = false;
    plan.vectors_in_plane = (inner + 2 * widest - 2) / widest;  // the maximum over all phases
  } else {
    plan.vector = 1;
    plan.vectors_in_plane = inner;
  }
  const int64_t vectors = plan.geometry.outer * plan.vectors_in_plane;
  plan.block_x = next_power_of_two(ceil_div(vectors, plan.kind.vectors), kWarp, kMaxThreads);
  // Several channels in a block are better than several waves of blocks with few loads.
  const auto fills_a_wave = [&](int block_x) {
    return 10 * ceil_div(channels, kMaxThreads / block_x) >= 9 * resident;
  };
  while (plan.block_x > kWarp && fills_a_wave(plan.block_x / 2)) {
    plan.block_x /= 2;
  }
  plan.block_y = next_power_of_two(channels, 1, kMaxThreads / plan.block_x);
  plan.tile_channels = plan.block_y;
  plan.tiles = ceil_div(channels, plan.block_y);
  split(plan, vectors, plan.block_x * plan.kind.vectors, kLongestShare / plan.vector, resident);
}

}  // namespace detail

// `pointers` are the data of all tensors of the input's shape that the pass accesses; null pointers
// are ignored.
inline Plan make_plan(const KernelKind& kind, const Geometry& geometry, DType dtype,
                      std::initializer_list<const void*> pointers, int multiprocessors) {
  Plan plan{};
  plan.kind = kind;
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
  const int64_t resident = int64_t{multiprocessors} * kind.blocks;
  if (geometry.is_matrix()) {
    detail::plan_matrix(plan, alignment, resident);
  } else {
    detail::plan_planar(plan, alignment, same_phase, resident);
  }
  return plan;
}

}  // namespace syncbn::cuda
