// How a reduction is cut into items of work. The cut depends on the shape alone, never on the
// number of threads, and partial results are merged by index: the same bits on every run.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/geometry.h"
#include "../common/stable.h"

namespace syncbn::cpu {

// Values summed in float before they go into a double, per channel.
constexpr int64_t kPlanarChunk = 1024;  // contiguous values: 4 KB of float32, L1
constexpr int64_t kMatrixChunk = 64;    // rows of up to kMatrixBlock channels: 64 KB, L2
constexpr int64_t kMatrixBlock = 256;   // channels of a matrix that one item owns

// Fewer values than this are not worth a thread: about 5 us.
constexpr int64_t kMinValuesPerThread = 16384;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Each channel has geometry.per_channel() values, numbered in memory order: its positions. An item
// is a segment of positions of a block of channels.
struct Partition {
  int64_t segments;
  int64_t segment_length;
  int64_t blocks;
  int64_t block_channels;

  explicit Partition(const Geometry& geometry) {
    constexpr int64_t kMaxItems = 64;
    const int64_t positions = geometry.per_channel();
    const int64_t chunk = geometry.is_matrix() ? kMatrixChunk : kPlanarChunk;
    block_channels = geometry.is_matrix() ? kMatrixBlock : 1;
    blocks = divide_up(geometry.channels, block_channels);
    const int64_t items = std::clamp<int64_t>(geometry.numel() / kMinValuesPerThread, 1, kMaxItems);
    segment_length = divide_up(positions, divide_up(items, blocks));
    segment_length = std::max<int64_t>(divide_up(segment_length, chunk), 1) * chunk;
    segments = std::max<int64_t>(divide_up(positions, segment_length), 1);
  }
};

// Calls function(segment, first channel, end channel, first position, end position) for each item.
template <typename Function>
void for_each_item(const Geometry& geometry, const Partition& partition, const Function& function) {
  const int64_t items = geometry.numel() == 0 ? 0 : partition.segments * partition.blocks;
  const int64_t values_per_item =
      std::max<int64_t>(geometry.numel() / std::max<int64_t>(items, 1), 1);
  torch::stable::parallel_for(
      0, items, divide_up(kMinValuesPerThread, values_per_item), [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t segment = item / partition.blocks;
          const int64_t channel = item % partition.blocks * partition.block_channels;
          const int64_t position = segment * partition.segment_length;
          function(segment, channel,
                   std::min(channel + partition.block_channels, geometry.channels), position,
                   std::min(position + partition.segment_length, geometry.per_channel()));
        }
      });
}

// A matrix with few channels is treated as one with this many times the channels and fewer rows,
// so that its loops over channels fill vectors. Rows that are left over keep their width.
inline int64_t rows_per_wide_row(int64_t channels) {
  constexpr int64_t kFullWidth = 64;
  return std::max<int64_t>(kFullWidth / channels, 1);
}

// The width of a tile of a matrix: at most kMatrixBlock, and no narrow one at the end.
inline int64_t even_columns(int64_t width) {
  constexpr int64_t kAlign = 16;
  const int64_t tiles = divide_up(width, kMatrixBlock);
  return std::min(divide_up(divide_up(width, tiles), kAlign) * kAlign, width);
}

// Element-wise work on a matrix: calls function(first value, rows, width) for pieces of rows of
// `width` values; width is channels, or channels * rows_per_wide_row(channels).
template <typename Function>
void for_each_row_range(const Geometry& geometry, const Function& function) {
  const int64_t channels = geometry.channels;
  const int64_t wide = rows_per_wide_row(channels);
  const int64_t wide_rows = geometry.outer / wide;
  const int64_t width = channels * wide;
  torch::stable::parallel_for(
      0, wide_rows, divide_up(kMinValuesPerThread, width),
      [&](int64_t begin, int64_t end) { function(begin * width, end - begin, width); });
  if (const int64_t rest = geometry.outer % wide; rest > 0) {
    function(wide_rows * width, rest, channels);
  }
}

// Element-wise work on planes: calls function(first value, end value).
template <typename Function>
void for_each_value_range(const Geometry& geometry, const Function& function) {
  const int64_t values = geometry.numel();
  torch::stable::parallel_for(0, divide_up(values, kPlanarChunk),
                              kMinValuesPerThread / kPlanarChunk, [&](int64_t begin, int64_t end) {
                                function(begin * kPlanarChunk,
                                         std::min(end * kPlanarChunk, values));
                              });
}

// The runs of contiguous values that positions [begin, end) of one channel consist of.
struct Runs {
  int64_t channel_stride;  // from a plane of a channel to the next
  int64_t inner;
  int64_t offset;  // of the current run, from the start of the tensor
  int64_t within;  // its place in its plane
  int64_t left;
  int64_t piece;  // values of a plane that make a chunk, 0 where a chunk takes many planes

  Runs(const Geometry& geometry, int64_t channel, int64_t begin, int64_t end)
      : channel_stride(geometry.channels * geometry.inner),
        inner(geometry.inner),
        offset(begin / geometry.inner * channel_stride + channel * geometry.inner +
               begin % geometry.inner),
        within(begin % geometry.inner),
        left(end - begin),
        piece(inner < kPlanarChunk / 2 ? 0 : divide_up(inner, divide_up(inner, kPlanarChunk))) {}

  int64_t length() const { return std::min(inner - within, left); }
  // Large planes are cut evenly, so that a chunk is contiguous and none is short; of small ones a
  // chunk takes as many values as there are.
  int64_t next_chunk() const {
    return piece > 0 ? std::min(piece, length()) : std::min(kPlanarChunk, left);
  }
  void advance(int64_t length) {
    left -= length;
    offset += length;
    within += length;
    if (within == inner) {
      offset += channel_stride - inner;
      within = 0;
    }
  }
};

}  // namespace syncbn::cpu
