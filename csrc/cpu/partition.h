// The partition of a reduction into tasks. It depends only on the shape, never on the number of
// threads, and partial results are merged by index: the same bits on every run.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/geometry.h"
#include "../common/stable.h"

namespace syncbn::cpu {

// The maximum number of columns of a task: their sums stay in L1. Tasks of a large input have up to
// kMaxColumns: in memory, processors prefetch whole rows better than parts of rows. In caches,
// fewer columns are faster. Measured on Zen 3.
constexpr int64_t kColumns = 512;
constexpr int64_t kMaxColumns = 1024;

// About 5 us of work: fewer values are not worth another thread.
constexpr int64_t kMinValuesPerThread = 16384;

inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr int64_t kShortPlane = 32;  // the size of the largest pack

// Returns whether the input is processed in rows of all channels' `inner` values: a matrix, or
// planes shorter than a pack. Longer planes are processed one by one.
inline bool is_in_rows(const Geometry& geometry) { return geometry.inner < kShortPlane; }

// A segment of the rows, for some channels; or a segment of one channel's values, in the order of
// memory.
struct Task {
  int64_t segment;
  int64_t channel;
  int64_t channels;
  int64_t begin;
  int64_t length;
};

struct Partition {
  int64_t length;  // rows, or values of a channel
  int64_t segments;
  int64_t segment_length;
  int64_t blocks;
  int64_t block_channels;

  explicit Partition(const Geometry& geometry) {
    constexpr int64_t kMaxTasks = 64;
    constexpr int64_t kLargeInput = int64_t{2} << 20;  // values
    const bool in_rows = is_in_rows(geometry);
    const bool wide =
        in_rows && geometry.numel() >= kLargeInput && geometry.channels * geometry.inner > kColumns;
    const int64_t columns = wide ? kMaxColumns : kColumns;
    const int64_t min_values = 128 * columns;  // per task: its fixed cost is small then
    length = in_rows ? geometry.outer : geometry.per_channel();
    block_channels = in_rows ? columns / geometry.inner : 1;
    blocks = ceil_div(geometry.channels, block_channels);
    const int64_t tasks = std::clamp<int64_t>(geometry.numel() / min_values, 1, kMaxTasks);
    const int64_t multiple = in_rows ? 16 : 1024;
    segment_length = ceil_div(length, ceil_div(tasks, blocks));
    segment_length = std::max<int64_t>(round_up(segment_length, multiple), multiple);
    segments = std::max<int64_t>(ceil_div(length, segment_length), 1);
  }
};

inline int64_t positions_of_segment(const Geometry& geometry, const Partition& partition,
                                    int64_t segment) {
  const int64_t left = partition.length - segment * partition.segment_length;
  return std::min(partition.segment_length, left) * (is_in_rows(geometry) ? geometry.inner : 1);
}

// The maximum number of a channel's values that a center is guessed from.
constexpr int kMaxSamples = 32;

// `samples` samples are spread over `count` positions; returns the position of number `sample`.
inline int64_t sample_position(int sample, int samples, int64_t count) {
  return count * (2 * sample + 1) / (2 * samples);
}

// Calls function(task) for each.
template <typename Function>
void for_each_task(const Geometry& geometry, const Partition& partition, const Function& function) {
  const int64_t tasks = geometry.numel() == 0 ? 0 : partition.segments * partition.blocks;
  const int64_t values_per_task =
      std::max<int64_t>(geometry.numel() / std::max<int64_t>(tasks, 1), 1);
  torch::stable::parallel_for(
      0, tasks, ceil_div(kMinValuesPerThread, values_per_task), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t segment = i / partition.blocks;
          const int64_t channel = i % partition.blocks * partition.block_channels;
          const int64_t first = segment * partition.segment_length;
          function(Task{segment, channel,
                        std::min(partition.block_channels, geometry.channels - channel), first,
                        std::min(partition.segment_length, partition.length - first)});
        }
      });
}

// Returns how many short rows are processed as one wide row of at most `limit` values, so that they
// fill packs. The remaining rows are processed one by one.
inline int64_t rows_per_wide_row(int64_t width, int64_t limit) {
  constexpr int64_t kFullPacks = 32;
  constexpr int64_t kFullWidth = 64;
  for (int64_t rows = ceil_div(kFullWidth, width); rows * width <= limit; ++rows) {
    if (rows * width % kFullPacks == 0) {
      return rows;
    }
  }
  return std::max<int64_t>(kFullWidth / width, 1);
}

// Iterates over the spans of contiguous values of a task of planes.
struct Spans {
  int64_t channel_stride;  // from a plane of a channel to the next
  int64_t inner;
  int64_t offset;  // of the current span, from the start of the tensor
  int64_t within;  // values of its plane before it
  int64_t left;

  Spans(const Geometry& geometry, int64_t channel, int64_t begin, int64_t count)
      : channel_stride(geometry.channels * geometry.inner),
        inner(geometry.inner),
        offset(begin / geometry.inner * channel_stride + channel * geometry.inner +
               begin % geometry.inner),
        within(begin % geometry.inner),
        left(count) {}

  int64_t length() const { return std::min(inner - within, left); }
  void next() {
    left -= length();
    offset += channel_stride - within;
    within = 0;
  }
};

}  // namespace syncbn::cpu
