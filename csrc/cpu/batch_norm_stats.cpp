// batch_norm_stats on the CPU.
//
// Each item of work owns a segment of positions of some channels. It goes through them once, in
// chunks, adding up for each the values, in double but for groups of four, and the squares of
// their deviations from a centre, in float (all in double for double). The values and not their
// deviations: a mean near zero would show the rounding of the centre. The centre of a chunk is the
// mean of the chunks before it, the first one's is its own mean: far enough from cancellation,
// since what rounding takes from the squares of a chunk whose mean is d away from the centre is
// small against the d^2 that merging it adds. Chunks, then segments, are merged exactly in double.
// Reads the input once from memory.

#include <vector>

#include "../common/checks.h"
#include "../common/dispatch.h"
#include "../common/moments.h"
#include "partition.h"
#include "simd.h"
#include "staging.h"

namespace syncbn::cpu {
namespace {

// Adds a chunk to the moments of `before` values, from its sum and its squared deviations.
SYNCBN_INLINE void merge_chunk(double before, double& mean, double& m2, double count, double sum,
                               double center, double squares) {
  Moments total{before, mean, m2};
  const double chunk_mean = sum / count;
  const double off = chunk_mean - center;
  const double chunk_m2 = squares - count * off * off;
  total.merge({count, chunk_mean, chunk_m2 < 0 ? 0 : chunk_m2});
  mean = total.mean;
  m2 = total.m2;
}

// Sums of a chunk that lies as rows, one for each column.
template <typename S>
struct ColumnSums {
  using A = compute_t<S>;
  // Four bfloat16 values add up exactly in float. Four floats do not, nor is a large mean apart
  // from a float that was staged.
  using GroupSum = std::conditional_t<std::is_same_v<S, BFloat16>, float, double>;

  alignas(64) double values[kMatrixBlock];
  alignas(64) A squares[kMatrixBlock];
  alignas(64) A center[kMatrixBlock];

  SYNCBN_INLINE void clear(int64_t columns) {
    for (int64_t c = 0; c < columns; ++c) {
      values[c] = 0;
      squares[c] = 0;
    }
  }

  template <int kRows>
  SYNCBN_INLINE void add_rows(const S* x, int64_t stride, int64_t columns) {
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < columns; ++c) {
      GroupSum value = 0;
      A square = 0;
      for (int r = 0; r < kRows; ++r) {
        const A v = to_compute(x[r * stride + c]);
        const A d = v - center[c];
        value += v;
        square += d * d;
      }
      values[c] += value;
      squares[c] += square;
    }
  }

  SYNCBN_INLINE void add(Rows<const S> x, int64_t rows, int64_t columns) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {  // four rows for each visit of the sums
      prefetch_ahead<S>({x.data + r * x.stride, x.stride}, 4, columns);
      add_rows<4>(x.data + r * x.stride, x.stride, columns);
    }
    for (; r < rows; ++r) {
      add_rows<1>(x.data + r * x.stride, x.stride, columns);
    }
  }
};

// A chunk of one channel is laid out as rows of kLanes values, and a shorter one with the rest.
template <typename T>
struct PlanarMoments {
  using S = staged_t<T>;
  using A = compute_t<T>;
  static constexpr int kColumns = kLanes<A>;

  static SYNCBN_INLINE void add_up(const S* x, int64_t n, A center, ColumnSums<S>& sums) {
    sums.clear(kColumns);
    std::fill(sums.center, sums.center + kColumns, center);
    const int64_t rows = n / kColumns;
    sums.add({x, kColumns}, rows, kColumns);
    sums.template add_rows<1>(x + rows * kColumns, 0, n % kColumns);
    fold<kColumns>(sums.values);
    fold<kColumns>(sums.squares);
  }

  static SYNCBN_INLINE void run(const T* x, Geometry geometry, int64_t channel, int64_t begin,
                                int64_t end, double* mean, double* m2) {
    alignas(64) S buffer[kPlanarChunk];
    ColumnSums<S> sums;
    double before = 0;
    for (Runs runs(geometry, channel, begin, end); runs.left > 0;) {
      int64_t n = runs.next_chunk();
      if (before == 0 && n < kPlanarChunk / 2) {
        // The end of a plane, where the segment begins. A few outliers there would make the centre
        // of a full chunk, and its squares would cancel; so the first chunk goes on to the next.
        n = std::min(kPlanarChunk, runs.left);
      }
      const S* chunk = load_runs(x, runs, n, buffer);
      const auto count = static_cast<double>(n);
      if (before == 0) {
        add_up(chunk, n, 0, sums);
        *mean = sums.values[0] / count;
      }
      const auto center = static_cast<A>(*mean);
      add_up(chunk, n, center, sums);
      merge_chunk(before, *mean, *m2, count, sums.values[0], center, sums.squares[0]);
      before += count;
    }
  }
};

template <typename T>
struct MatrixMoments {
  using S = staged_t<T>;
  using A = compute_t<T>;

  static SYNCBN_INLINE void add_up(Rows<const T> x, int64_t rows, int64_t width,
                                   ColumnSums<S>& sums) {
    constexpr int64_t kTile = kPlanarChunk;
    alignas(64) S buffer[kStaged<T> ? kTile : 1];
    sums.clear(width);
    const int64_t tile_rows = kTile / width;
    for (int64_t first = 0; first < rows; first += tile_rows) {
      const int64_t n = std::min(tile_rows, rows - first);
      sums.add(load_rows<T>({x.data + first * x.stride, x.stride}, n, width, buffer), n, width);
    }
  }

  // x is the item's top left value; width <= kMatrixBlock.
  static SYNCBN_INLINE void run(Rows<const T> x, int64_t rows, int64_t width, double* mean,
                                double* m2) {
    ColumnSums<S> sums;
    for (int64_t first = 0; first < rows; first += kMatrixChunk) {
      const int64_t n = std::min(kMatrixChunk, rows - first);
      const auto count = static_cast<double>(n);
      const Rows<const T> chunk{x.data + first * x.stride, x.stride};
      if (first == 0) {
        std::fill(sums.center, sums.center + width, static_cast<A>(0));
        add_up(chunk, n, width, sums);
        for (int64_t c = 0; c < width; ++c) {
          sums.center[c] = static_cast<A>(sums.values[c] / count);
        }
      }
      add_up(chunk, n, width, sums);
      SYNCBN_INDEPENDENT
      for (int64_t c = 0; c < width; ++c) {
        merge_chunk(static_cast<double>(first), mean[c], m2[c], count, sums.values[c],
                    sums.center[c], sums.squares[c]);
        sums.center[c] = static_cast<A>(mean[c]);
      }
    }
  }
};

// Adds moments of `count` values in each channel to those of `before` values.
SYNCBN_INLINE void merge_channels(int64_t channels, double before, double* mean, double* m2,
                                  double count, const double* other_mean, const double* other_m2) {
  SYNCBN_INDEPENDENT
  for (int64_t c = 0; c < channels; ++c) {
    Moments total{before, mean[c], m2[c]};
    total.merge({count, other_mean[c], other_m2[c]});
    mean[c] = total.mean;
    m2[c] = total.m2;
  }
}

// Means and sums of squared deviations of `width` channels, which are zero so far.
template <typename T>
void matrix_moments(Rows<const T> x, int64_t rows, int64_t width, double* mean, double* m2) {
  const int64_t wide = width == x.stride ? rows_per_wide_row(width) : 1;
  if (wide == 1) {
    return run<MatrixMoments<T>>(x, rows, width, mean, m2);
  }
  const auto wide_rows = rows / wide;
  double means[kMatrixBlock] = {};
  double m2s[kMatrixBlock] = {};
  run<MatrixMoments<T>>(Rows<const T>{x.data, width * wide}, wide_rows, width * wide, means, m2s);
  const int64_t done = wide_rows * wide;
  for (int64_t i = 0; i < wide; ++i) {
    merge_channels(width, static_cast<double>(i * wide_rows), mean, m2,
                   static_cast<double>(wide_rows), means + i * width, m2s + i * width);
  }
  std::fill(means, means + width, 0);
  std::fill(m2s, m2s + width, 0);
  run<MatrixMoments<T>>(Rows<const T>{x.data + done * width, width}, rows - done, width, means,
                        m2s);
  merge_channels(width, static_cast<double>(done), mean, m2, static_cast<double>(rows - done),
                 means, m2s);
}

Tensor batch_norm_stats(const Tensor& input) {
  const Geometry geometry = check_input("syncbn::batch_norm_stats", "input", input);
  const Partition partition(geometry);
  const int64_t channels = geometry.channels;
  std::vector<double> means(partition.segments * channels);
  std::vector<double> m2s(partition.segments * channels);

  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    for_each_item(
        geometry, partition,
        [&](int64_t segment, int64_t channel, int64_t end_channel, int64_t begin, int64_t end) {
          double* const mean = &means[segment * channels + channel];
          double* const m2 = &m2s[segment * channels + channel];
          if (geometry.is_matrix()) {
            matrix_moments<T>({x + begin * channels + channel, channels}, end - begin,
                              end_channel - channel, mean, m2);
          } else {
            run<PlanarMoments<T>>(x, geometry, channel, begin, end, mean, m2);
          }
        });
  });

  // The first segment takes up the others.
  for (int64_t segment = 1; segment < partition.segments; ++segment) {
    const int64_t before = segment * partition.segment_length;
    const int64_t end = std::min(before + partition.segment_length, geometry.per_channel());
    merge_channels(channels, static_cast<double>(before), means.data(), m2s.data(),
                   static_cast<double>(end - before), &means[segment * channels],
                   &m2s[segment * channels]);
  }
  Tensor message = torch::stable::new_empty(input, {2 * channels + 1}, ScalarType::Double);
  auto* values = static_cast<double*>(message.mutable_data_ptr());
  const auto count = static_cast<double>(geometry.per_channel());
  for (int64_t c = 0; c < channels; ++c) {
    write_message(values, channels, c, {count, means[c], m2s[c]});
  }
  return message;
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&syncbn::cpu::batch_norm_stats));
}
