// batch_norm_backward_reduce on the CPU.
//
// Each item of work owns a segment of positions of some channels and sums dy and dy * (x - mean)
// in float32 (float64 for double) over chunks, in double across chunks and segments. Reads both
// tensors once.

#include <vector>

#include "../common/checks.h"
#include "../common/dispatch.h"
#include "channel_vector.h"
#include "partition.h"
#include "simd.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_backward_reduce";

struct GradSums {
  double grad = 0;            // sum of dy
  double grad_deviation = 0;  // sum of dy * (x - mean)

  void add(const GradSums& other) {
    grad += other.grad;
    grad_deviation += other.grad_deviation;
  }
};

template <typename T>
struct PlanarGradSums {
  using A = compute_t<T>;
  static constexpr int L = kLanes<T>;

  static SYNCBN_INLINE void add_run(const T* dy, const T* x, int64_t n, A center, A rest,
                                    GradSums& sums) {
    A lanes[L] = {};
    A deviation_lanes[L] = {};
    int64_t i = 0;
    for (; i + L <= n; i += L) {
      for (int l = 0; l < L; ++l) {
        const A g = static_cast<A>(dy[i + l]);
        lanes[l] += g;
        deviation_lanes[l] += g * ((static_cast<A>(x[i + l]) - center) - rest);
      }
    }
    for (; i < n; ++i) {
      const A g = static_cast<A>(dy[i]);
      sums.grad += g;
      sums.grad_deviation += g * ((static_cast<A>(x[i]) - center) - rest);
    }
    for (int l = 0; l < L; ++l) {
      sums.grad += lanes[l];
      sums.grad_deviation += deviation_lanes[l];
    }
  }

  static SYNCBN_INLINE void run(const T* dy, const T* x, Geometry geometry, int64_t channel,
                                int64_t begin, int64_t end, A center, A rest, GradSums* out) {
    GradSums sums;
    for (Runs runs(geometry, channel, begin, end); runs.left > 0;) {
      const int64_t n = std::min(runs.length(), kPlanarChunk);
      add_run(dy + runs.offset, x + runs.offset, n, center, rest, sums);
      runs.advance(n);
    }
    *out = sums;
  }
};

template <typename T>
struct MatrixGradSums {
  using A = compute_t<T>;

  // dy and x are the item's top left values; rows are `stride` values apart; width <= kMatrixBlock.
  static SYNCBN_INLINE void run(const T* dy, const T* x, int64_t rows, int64_t stride,
                                int64_t width, const A* center, const A* rest, GradSums* out) {
    alignas(64) A grad[kMatrixBlock];
    alignas(64) A deviation[kMatrixBlock];
    for (int64_t first = 0; first < rows; first += kMatrixChunk) {
      const int64_t last = std::min(first + kMatrixChunk, rows);
      for (int64_t c = 0; c < width; ++c) {
        grad[c] = deviation[c] = 0;
      }
      for (int64_t r = first; r < last; ++r) {
        const T* dy_row = dy + r * stride;
        const T* x_row = x + r * stride;
        for (int64_t c = 0; c < width; ++c) {
          const A g = static_cast<A>(dy_row[c]);
          grad[c] += g;
          deviation[c] += g * ((static_cast<A>(x_row[c]) - center[c]) - rest[c]);
        }
      }
      for (int64_t c = 0; c < width; ++c) {
        out[c].grad += grad[c];
        out[c].grad_deviation += deviation[c];
      }
    }
  }
};

template <typename T>
void matrix_grad_sums(const T* dy, const T* x, int64_t rows, int64_t stride, int64_t width,
                      const compute_t<T>* center, const compute_t<T>* rest, GradSums* out) {
  const int64_t wide = width == stride ? rows_per_wide_row(width) : 1;
  if (wide > 1) {
    const int64_t wide_rows = rows / wide;
    GradSums partials[kMatrixBlock];
    run<MatrixGradSums<T>>(dy, x, wide_rows, stride * wide, width * wide, center, rest, partials);
    for (int64_t i = 0; i < width * wide; ++i) {
      out[i % width].add(partials[i]);
    }
    dy += wide_rows * wide * stride;
    x += wide_rows * wide * stride;
    rows -= wide_rows * wide;
  }
  run<MatrixGradSums<T>>(dy, x, rows, stride, width, center, rest, out);
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
  std::vector<GradSums> partials(partition.segments * channels);

  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = compute_t<T>;
    const auto* dy = static_cast<const T*>(grad_output.const_data_ptr());
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    const auto center = channel_array<A>(geometry, [&](int64_t c) { return means[c]; });
    const auto rest =
        channel_array<A>(geometry, [&](int64_t c) { return means[c] - static_cast<A>(means[c]); });
    for_each_item(
        geometry, partition,
        [&](int64_t segment, int64_t channel, int64_t end_channel, int64_t begin, int64_t end) {
          GradSums* out = &partials[segment * channels + channel];
          if (geometry.is_matrix()) {
            const int64_t first = begin * channels + channel;
            matrix_grad_sums(dy + first, x + first, end - begin, channels, end_channel - channel,
                             &center[channel], &rest[channel], out);
          } else {
            run<PlanarGradSums<T>>(dy, x, geometry, channel, begin, end, center[channel],
                                   rest[channel], out);
          }
        });
  });

  std::vector<double> grad_weights(channels);
  std::vector<double> grad_biases(channels);
  Tensor sums = torch::stable::new_empty(mean, {2 * channels});
  auto* message = static_cast<double*>(sums.mutable_data_ptr());
  for (int64_t c = 0; c < channels; ++c) {
    GradSums total;
    for (int64_t segment = 0; segment < partition.segments; ++segment) {
      total.add(partials[segment * channels + c]);
    }
    message[c] = grad_biases[c] = total.grad;
    message[channels + c] = grad_weights[c] = total.grad_deviation * invstds[c];
  }

  const ScalarType grad_dtype = weight.has_value() ? weight->scalar_type() : ScalarType::Double;
  Tensor grad_weight = torch::stable::new_empty(mean, {channels}, grad_dtype);
  Tensor grad_bias = torch::stable::new_empty(mean, {channels}, grad_dtype);
  write_channels(grad_weight, grad_weights);
  write_channels(grad_bias, grad_biases);
  return {sums, grad_weight, grad_bias};
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&syncbn::cpu::batch_norm_backward_reduce));
}
