// Element-wise work: reads one or two tensors and writes one of the same geometry, once each.
//
// What is computed is an Op<A>: a struct of kConstants values of the compute type A, a channel's
// constants, whose operator() takes one value of each of kInputs tensors and gives the output.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "partition.h"
#include "simd.h"
#include "staging.h"

namespace syncbn::cpu {

// Tiles of at most kTile values are computed one after the other, through buffers where T is
// staged.
template <template <typename> class Op, typename T>
struct Elementwise {
  using A = compute_t<T>;
  using S = staged_t<T>;
  static constexpr int kInputs = Op<A>::kInputs;
  static constexpr int kConstants = Op<A>::kConstants;
  static constexpr int64_t kTile = kPlanarChunk;
  using Inputs = std::make_index_sequence<kInputs>;
  using Constants = std::make_index_sequence<kConstants>;

  std::array<const T*, kInputs> inputs;
  T* output;
  Geometry geometry;
  const A* constants;  // [kConstants][period]
  int64_t period;

  // Loops over the inputs would keep the loops over values from being
  // vectorised, hence the parameter packs.
  struct Tile {
    std::array<Rows<const S>, kInputs> in;
    Rows<S> out;

    template <size_t... K>
    static SYNCBN_INLINE Op<A> constants_at(const A* constants, int64_t period,
                                            std::index_sequence<K...>) {
      return {constants[K * period]...};
    }

    template <size_t... I>
    SYNCBN_INLINE void compute(const Op<A>& op, int64_t row, int64_t column,
                               std::index_sequence<I...>) const {
      out.data[row * out.stride + column] =
          from_compute<S>(op(to_compute(in[I].data[row * in[I].stride + column])...));
    }

    // Row 0, from `begin` to `end`, with the same constants.
    SYNCBN_INLINE void compute_plane(const Op<A>& op, int64_t begin, int64_t end) const {
      SYNCBN_INDEPENDENT
      for (int64_t i = begin; i < end; ++i) {
        compute(op, 0, i, Inputs{});
      }
    }

    // A row with constants for each column. One row at a time, although the constants are read
    // for each: hardware prefetching follows a single stream best.
    SYNCBN_INLINE void compute_row(const A* constants, int64_t period, int64_t row,
                                   int64_t columns) const {
      SYNCBN_INDEPENDENT
      for (int64_t c = 0; c < columns; ++c) {
        compute(constants_at(constants + c, period, Constants{}), row, c, Inputs{});
      }
    }
  };

  // The tile of `rows` times `columns` values from `first` on, in rows that are `stride` apart.
  struct Stage {
    alignas(64) S buffers[kInputs][kStaged<T> ? kTile : 1];

    template <size_t... I>
    SYNCBN_INLINE Tile load(const Elementwise& job, int64_t first, int64_t rows, int64_t columns,
                            int64_t stride, std::index_sequence<I...>) {
      const std::array<Rows<const S>, kInputs> in{
          load_rows<T>({job.inputs[I] + first, stride}, rows, columns, buffers[I])...};
      if constexpr (kStaged<T>) {
        return {in, {buffers[0], columns}};
      } else {
        return {in, {job.output + first, stride}};
      }
    }

    SYNCBN_INLINE void store(const Elementwise& job, int64_t first, int64_t rows, int64_t columns,
                             int64_t stride) {
      if constexpr (kStaged<T>) {
        store_rows<T>(buffers[0], {job.output + first, stride}, rows, columns);
      }
    }
  };

  // Values [begin, end) of a planar geometry.
  struct Planes {
    static SYNCBN_INLINE void run(const Elementwise* job_pointer, int64_t begin, int64_t end) {
      const Elementwise job = *job_pointer;
      const int64_t inner = job.geometry.inner;
      Stage stage;
      for (int64_t first = begin; first < end; first += kTile) {
        const int64_t n = std::min(kTile, end - first);
        const Tile tile = stage.load(job, first, 1, n, n, Inputs{});
        int64_t channel = first / inner % job.geometry.channels;
        int64_t piece_end = std::min(inner - first % inner, n);
        for (int64_t i = 0; i < n;) {
          tile.compute_plane(Tile::constants_at(job.constants + channel, job.period, Constants{}),
                             i, piece_end);
          i = piece_end;
          piece_end = std::min(i + inner, n);
          channel = channel + 1 == job.geometry.channels ? 0 : channel + 1;
        }
        stage.store(job, first, 1, n, n);
      }
    }
  };

  // Rows of `width` values, one for each entry of the constants, from value `first` on.
  struct Matrix {
    static SYNCBN_INLINE void run(const Elementwise* job_pointer, int64_t first, int64_t rows,
                                  int64_t width) {
      const Elementwise job = *job_pointer;
      const int64_t tile_columns = even_columns(width);
      const int64_t tile_rows = kTile / tile_columns;
      Stage stage;
      for (int64_t row = 0; row < rows; row += tile_rows) {
        const int64_t n = std::min(tile_rows, rows - row);
        for (int64_t column = 0; column < width; column += tile_columns) {
          const int64_t columns = std::min(tile_columns, width - column);
          const int64_t offset = first + row * width + column;
          const Tile tile = stage.load(job, offset, n, columns, width, Inputs{});
          const A* const constants = job.constants + column;
          for (int64_t r = 0; r < n; ++r) {
            tile.compute_row(constants, job.period, r, columns);
          }
          stage.store(job, offset, n, columns, width);
        }
      }
    }
  };
};

// constant(k, channel) is the k-th constant of a channel, in double.
template <template <typename> class Op, typename T, size_t kInputs, typename Constant>
void elementwise(const Geometry& geometry, const std::array<const T*, kInputs>& inputs, T* output,
                 const Constant& constant) {
  using Job = Elementwise<Op, T>;
  using A = typename Job::A;
  const int64_t channels = geometry.channels;
  const int64_t repeats = geometry.is_matrix() ? rows_per_wide_row(channels) : 1;
  const int64_t width = channels * repeats;
  struct alignas(64) Line {  // vectors of constants must not straddle cache lines
    A values[64 / sizeof(A)];
  };
  const int64_t lines = divide_up(width * sizeof(A), sizeof(Line));
  std::vector<Line> storage(Job::kConstants * lines);
  A* const constants = storage.data()->values;
  const int64_t period = lines * (sizeof(Line) / sizeof(A));
  for (int k = 0; k < Job::kConstants; ++k) {
    A* const out = constants + k * period;
    for (int64_t c = 0; c < channels; ++c) {
      out[c] = static_cast<A>(constant(k, c));
    }
    for (int64_t i = channels; i < width; ++i) {
      out[i] = out[i - channels];
    }
  }
  const Job job{inputs, output, geometry, constants, period};
  if (geometry.is_matrix()) {
    for_each_row_range(geometry, [&](int64_t first, int64_t rows, int64_t width) {
      run<typename Job::Matrix>(&job, first, rows, width);
    });
  } else {
    for_each_value_range(
        geometry, [&](int64_t begin, int64_t end) { run<typename Job::Planes>(&job, begin, end); });
  }
}

}  // namespace syncbn::cpu
