// batch_norm_backward_reduce on the CPU.
//
// Each item of work owns a segment of positions of some channels and sums dy and
// dy * (x - center) in float (double for double) over chunks, in double across chunks and
// segments; center is the float next to the mean, and what that leaves of the mean is made good
// for once, at the end. Reads both tensors once.

#include <vector>

#include "../common/checks.h"
#include "../common/dispatch.h"
#include "channel_vector.h"
#include "partition.h"
#include "simd.h"
#include "staging.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_backward_reduce";

// Sums of a chunk that lies as rows, one for each column.
template <typename S>
struct ColumnGradSums {
  using A = compute_t<S>;

  alignas(64) A grads[kMatrixBlock];
  alignas(64) A deviations[kMatrixBlock];

  SYNCBN_INLINE void clear(int64_t columns) {
    for (int64_t c = 0; c < columns; ++c) {
      grads[c] = 0;
      deviations[c] = 0;
    }
  }

  template <int kRows>
  SYNCBN_INLINE void add_rows(const S* dy, int64_t dy_stride, const S* x, int64_t x_stride,
                              int64_t columns, const A* center) {
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < columns; ++c) {
      A grad = 0;
      A deviation = 0;
      for (int r = 0; r < kRows; ++r) {
        const A g = to_compute(dy[r * dy_stride + c]);
        grad += g;
        deviation += g * (to_compute(x[r * x_stride + c]) - center[c]);
      }
      grads[c] += grad;
      deviations[c] += deviation;
    }
  }

  SYNCBN_INLINE void add(Rows<const S> dy, Rows<const S> x, int64_t rows, int64_t columns,
                         const A* center) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {  // four rows for each visit of the sums
      add_rows<4>(dy.data + r * dy.stride, dy.stride, x.data + r * x.stride, x.stride, columns,
                  center);
    }
    for (; r < rows; ++r) {
      add_rows<1>(dy.data + r * dy.stride, 0, x.data + r * x.stride, 0, columns, center);
    }
  }

  SYNCBN_INLINE void add_to(double* grad, double* deviation, int64_t columns) const {
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < columns; ++c) {
      grad[c] += grads[c];
      deviation[c] += deviations[c];
    }
  }
};

// A chunk of one channel is laid out as rows of kLanes values, and a shorter one with the rest.
template <typename T>
struct PlanarGradSums {
  using S = staged_t<T>;
  using A = compute_t<T>;
  static constexpr int kColumns = kLanes<A>;

  static SYNCBN_INLINE void run(const T* dy, const T* x, Geometry geometry, int64_t channel,
                                int64_t begin, int64_t end, A center, double* grad,
                                double* deviation) {
    alignas(64) S dy_buffer[kPlanarChunk];
    alignas(64) S x_buffer[kPlanarChunk];
    alignas(64) A centers[kColumns];
    std::fill(centers, centers + kColumns, center);
    ColumnGradSums<S> sums;
    double grads[kColumns] = {};
    double deviations[kColumns] = {};
    for (Runs runs(geometry, channel, begin, end); runs.left > 0;) {
      const int64_t n = runs.next_chunk();
      Runs same = runs;
      const S* dy_chunk = load_runs(dy, same, n, dy_buffer);
      const S* x_chunk = load_runs(x, runs, n, x_buffer);
      const int64_t rows = n / kColumns;
      const int64_t done = rows * kColumns;
      sums.clear(kColumns);
      sums.add({dy_chunk, kColumns}, {x_chunk, kColumns}, rows, kColumns, centers);
      sums.template add_rows<1>(dy_chunk + done, 0, x_chunk + done, 0, n - done, centers);
      sums.add_to(grads, deviations, kColumns);
    }
    fold<kColumns>(grads);
    fold<kColumns>(deviations);
    *grad = grads[0];
    *deviation = deviations[0];
  }
};

template <typename T>
struct MatrixGradSums {
  using S = staged_t<T>;
  using A = compute_t<T>;

  // dy and x are the item's top left values; width <= kMatrixBlock.
  static SYNCBN_INLINE void run(Rows<const T> dy, Rows<const T> x, int64_t rows, int64_t width,
                                const A* center, double* grad, double* deviation) {
    constexpr int64_t kTile = kPlanarChunk;
    alignas(64) S dy_buffer[kStaged<T> ? kTile : 1];
    alignas(64) S x_buffer[kStaged<T> ? kTile : 1];
    ColumnGradSums<S> sums;
    const int64_t tile_rows = kTile / width;
    for (int64_t chunk = 0; chunk < rows; chunk += kMatrixChunk) {
      const int64_t end = std::min(chunk + kMatrixChunk, rows);
      sums.clear(width);
      for (int64_t first = chunk; first < end; first += tile_rows) {
        const int64_t n = std::min(tile_rows, end - first);
        const int64_t offset = first * x.stride;
        const auto dy_tile = load_rows<T>({dy.data + offset, dy.stride}, n, width, dy_buffer);
        const auto x_tile = load_rows<T>({x.data + offset, x.stride}, n, width, x_buffer);
        sums.add(dy_tile, x_tile, n, width, center);
      }
      sums.add_to(grad, deviation, width);
    }
  }
};

// Sums of `width` channels, which are zero so far.
template <typename T>
void matrix_grad_sums(Rows<const T> dy, Rows<const T> x, int64_t rows, int64_t width,
                      const compute_t<T>* center, double* grad, double* deviation) {
  const int64_t wide = width == x.stride ? rows_per_wide_row(width) : 1;
  const int64_t wide_rows = wide > 1 ? rows / wide : 0;
  const int64_t done = wide_rows * wide;
  if (wide_rows > 0) {
    compute_t<T> centers[kMatrixBlock];
    double grads[kMatrixBlock] = {};
    double deviations[kMatrixBlock] = {};
    const int64_t columns = width * wide;
    for (int64_t i = 0; i < columns; ++i) {
      centers[i] = center[i % width];
    }
    run<MatrixGradSums<T>>(Rows<const T>{dy.data, columns}, Rows<const T>{x.data, columns},
                           wide_rows, columns, +centers, +grads, +deviations);
    for (int64_t i = 0; i < columns; ++i) {
      grad[i % width] += grads[i];
      deviation[i % width] += deviations[i];
    }
  }
  run<MatrixGradSums<T>>(Rows<const T>{dy.data + done * dy.stride, dy.stride},
                         Rows<const T>{x.data + done * x.stride, x.stride}, rows - done, width,
                         center, grad, deviation);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad_output,
                                                              const Tensor& input,
                                                              const Tensor& mean,
                                                              const Tensor& invstd,
                                                              std::optional<Tensor> weight) {
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  check_grad_output(kOp, grad_output, input, geometry);
  check_statistics(kOp, "mean", mean, channels, input);
  check_statistics(kOp, "invstd", invstd, channels, input);
  check_channel_vector(kOp, "weight", weight, input);

  const Partition partition(geometry);
  const auto* means = static_cast<const double*>(mean.const_data_ptr());
  const auto* invstds = static_cast<const double*>(invstd.const_data_ptr());
  std::vector<double> grads(partition.segments * channels);
  std::vector<double> deviations(partition.segments * channels);
  std::vector<double> rests(channels);  // of the means, from the centers

  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* dy = static_cast<const T*>(grad_output.const_data_ptr());
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    std::vector<compute_t<T>> centers(channels);
    for (int64_t c = 0; c < channels; ++c) {
      centers[c] = static_cast<compute_t<T>>(means[c]);
      rests[c] = means[c] - centers[c];
    }
    for_each_item(
        geometry, partition,
        [&](int64_t segment, int64_t channel, int64_t end_channel, int64_t begin, int64_t end) {
          double* const grad = &grads[segment * channels + channel];
          double* const deviation = &deviations[segment * channels + channel];
          if (geometry.is_matrix()) {
            const int64_t first = begin * channels + channel;
            matrix_grad_sums<T>({dy + first, channels}, {x + first, channels}, end - begin,
                                end_channel - channel, &centers[channel], grad, deviation);
          } else {
            run<PlanarGradSums<T>>(dy, x, geometry, channel, begin, end, centers[channel], grad,
                                   deviation);
          }
        });
  });

  // The first segment takes up the others.
  for (int64_t segment = 1; segment < partition.segments; ++segment) {
    for (int64_t c = 0; c < channels; ++c) {
      grads[c] += grads[segment * channels + c];
      deviations[c] += deviations[segment * channels + c];
    }
  }
  grads.resize(channels);
  deviations.resize(channels);
  Tensor sums = torch::stable::new_empty(mean, {2 * channels});
  auto* message = static_cast<double*>(sums.mutable_data_ptr());
  for (int64_t c = 0; c < channels; ++c) {
    deviations[c] = (deviations[c] - rests[c] * grads[c]) * invstds[c];
    message[c] = grads[c];
    message[channels + c] = deviations[c];
  }

  const ScalarType grad_dtype = weight.has_value() ? weight->scalar_type() : ScalarType::Double;
  Tensor grad_weight = torch::stable::new_empty(mean, {channels}, grad_dtype);
  Tensor grad_bias = torch::stable::new_empty(mean, {channels}, grad_dtype);
  write_channels(grad_weight, deviations);
  write_channels(grad_bias, grads);
  return {sums, grad_weight, grad_bias};
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&syncbn::cpu::batch_norm_backward_reduce));
}
