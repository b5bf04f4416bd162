// batch_norm_stats on the CPU.
//
// Each item of work owns a segment of positions of some channels. It goes through them in chunks
// that stay in cache: one pass for the mean, summed in double, and one for the sum of squared
// deviations from that mean as a float, in float (all in double for double). Chunks, then
// segments, are merged exactly in double. Reads the input once from memory.

#include <type_traits>
#include <vector>

#include "../common/checks.h"
#include "../common/dispatch.h"
#include "../common/moments.h"
#include "partition.h"
#include "simd.h"

namespace syncbn::cpu {
namespace {

// Moments of a chunk, from its squared deviations from a centre that is its mean but for rounding.
SYNCBN_INLINE Moments from_deviations(double count, double mean, double center, double squares) {
  const double rounding = mean - center;
  const double m2 = squares - count * rounding * rounding;
  return {count, mean, m2 < 0 ? 0 : m2};
}

template <typename T>
struct PlanarMoments {
  using A = compute_t<T>;
  static constexpr int L = kLanes<T>;

  static SYNCBN_INLINE double sum_run(const T* x, int64_t n) {
    double lanes[L] = {};
    double total = 0;
    int64_t i = 0;
    for (; i + L <= n; i += L) {
      for (int l = 0; l < L; ++l) {
        lanes[l] += static_cast<A>(x[i + l]);
      }
    }
    for (; i < n; ++i) {
      total += static_cast<A>(x[i]);
    }
    for (int l = 0; l < L; ++l) {
      total += lanes[l];
    }
    return total;
  }

  static SYNCBN_INLINE double squares_run(const T* x, int64_t n, A center) {
    A lanes[L] = {};
    double total = 0;
    int64_t i = 0;
    for (; i + L <= n; i += L) {
      for (int l = 0; l < L; ++l) {
        const A d = static_cast<A>(x[i + l]) - center;
        lanes[l] += d * d;
      }
    }
    for (; i < n; ++i) {
      const A d = static_cast<A>(x[i]) - center;
      total += d * d;
    }
    for (int l = 0; l < L; ++l) {
      total += lanes[l];
    }
    return total;
  }

  static SYNCBN_INLINE void run(const T* x, Geometry geometry, int64_t channel, int64_t begin,
                                int64_t end, Moments* out) {
    Moments total;
    for (int64_t chunk = begin; chunk < end; chunk += kPlanarChunk) {
      const int64_t chunk_end = std::min(chunk + kPlanarChunk, end);
      const double count = static_cast<double>(chunk_end - chunk);
      double sum = 0;
      for (Runs runs(geometry, channel, chunk, chunk_end); runs.left > 0;) {
        const int64_t n = runs.length();
        sum += sum_run(x + runs.offset, n);
        runs.advance(n);
      }
      const double mean = sum / count;
      const A center = static_cast<A>(mean);
      double squares = 0;
      for (Runs runs(geometry, channel, chunk, chunk_end); runs.left > 0;) {
        const int64_t n = runs.length();
        squares += squares_run(x + runs.offset, n, center);
        runs.advance(n);
      }
      total.merge(from_deviations(count, mean, center, squares));
    }
    *out = total;
  }
};

template <typename T>
struct MatrixMoments {
  using A = compute_t<T>;
  // Four 16-bit values add up exactly in float, four floats only in double.
  using Sum = std::conditional_t<sizeof(T) == 2, float, double>;

  // x is the item's top left value; rows are `stride` values apart; width <= kMatrixBlock.
  static SYNCBN_INLINE void run(const T* x, int64_t rows, int64_t stride, int64_t width,
                                Moments* out) {
    alignas(64) double mean[kMatrixBlock];
    alignas(64) A center[kMatrixBlock];
    alignas(64) A squares[kMatrixBlock];
    for (int64_t first = 0; first < rows; first += kMatrixChunk) {
      const int64_t count = std::min(kMatrixChunk, rows - first);
      const T* chunk = x + first * stride;
      for (int64_t c = 0; c < width; ++c) {
        mean[c] = 0;
        squares[c] = 0;
      }
      int64_t r = 0;
      for (; r + 4 <= count; r += 4) {  // four rows for each visit of the accumulators
        const T* row = chunk + r * stride;
        for (int64_t c = 0; c < width; ++c) {
          mean[c] +=
              (static_cast<Sum>(row[c]) + static_cast<Sum>(row[stride + c])) +
              (static_cast<Sum>(row[2 * stride + c]) + static_cast<Sum>(row[3 * stride + c]));
        }
      }
      for (; r < count; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          mean[c] += static_cast<A>(chunk[r * stride + c]);
        }
      }
      for (int64_t c = 0; c < width; ++c) {
        mean[c] /= static_cast<double>(count);
        center[c] = static_cast<A>(mean[c]);
      }
      for (r = 0; r + 4 <= count; r += 4) {
        const T* row = chunk + r * stride;
        for (int64_t c = 0; c < width; ++c) {
          const A d0 = static_cast<A>(row[c]) - center[c];
          const A d1 = static_cast<A>(row[stride + c]) - center[c];
          const A d2 = static_cast<A>(row[2 * stride + c]) - center[c];
          const A d3 = static_cast<A>(row[3 * stride + c]) - center[c];
          squares[c] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
        }
      }
      for (; r < count; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          const A d = static_cast<A>(chunk[r * stride + c]) - center[c];
          squares[c] += d * d;
        }
      }
      for (int64_t c = 0; c < width; ++c) {
        out[c].merge(from_deviations(static_cast<double>(count), mean[c], center[c], squares[c]));
      }
    }
  }
};

// Moments of `width` channels over `rows` rows that are `stride` values apart.
template <typename T>
void matrix_moments(const T* x, int64_t rows, int64_t stride, int64_t width, Moments* out) {
  const int64_t wide = width == stride ? rows_per_wide_row(width) : 1;
  if (wide > 1) {
    const int64_t wide_rows = rows / wide;
    Moments partials[kMatrixBlock];
    run<MatrixMoments<T>>(x, wide_rows, stride * wide, width * wide, partials);
    for (int64_t i = 0; i < width * wide; ++i) {
      out[i % width].merge(partials[i]);
    }
    x += wide_rows * wide * stride;
    rows -= wide_rows * wide;
  }
  run<MatrixMoments<T>>(x, rows, stride, width, out);
}

Tensor batch_norm_stats(const Tensor& input) {
  const Geometry geometry = check_input("syncbn::batch_norm_stats", "input", input);
  const Partition partition(geometry);
  const int64_t channels = geometry.channels;
  std::vector<Moments> partials(partition.segments * channels);

  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    for_each_item(
        geometry, partition,
        [&](int64_t segment, int64_t channel, int64_t end_channel, int64_t begin, int64_t end) {
          Moments* out = &partials[segment * channels + channel];
          if (geometry.is_matrix()) {
            matrix_moments(x + begin * channels + channel, end - begin, channels,
                           end_channel - channel, out);
          } else {
            run<PlanarMoments<T>>(x, geometry, channel, begin, end, out);
          }
        });
  });

  Tensor message = torch::stable::new_empty(input, {2 * channels + 1}, ScalarType::Double);
  auto* values = static_cast<double*>(message.mutable_data_ptr());
  for (int64_t c = 0; c < channels; ++c) {
    Moments total;
    for (int64_t segment = 0; segment < partition.segments; ++segment) {
      total.merge(partials[segment * channels + c]);
    }
    write_message(values, channels, c, total);
  }
  return message;
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&syncbn::cpu::batch_norm_stats));
}
