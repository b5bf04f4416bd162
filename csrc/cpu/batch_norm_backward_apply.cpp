// batch_norm_backward_apply on the CPU: one pass, which reads dy and x and writes dx once each.

#include <vector>

#include "../common/checks.h"
#include "../common/dispatch.h"
#include "channel_vector.h"
#include "partition.h"
#include "simd.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_backward_apply";

// scale = weight * invstd, mean_dy = sum(dy) / count, slope = invstd * sum(dy * xhat) / count
template <typename T, typename A>
SYNCBN_INLINE T grad_input_value(T dy, T x, A center, A rest, A mean_dy, A slope, A scale) {
  const A deviation = (static_cast<A>(x) - center) - rest;
  return static_cast<T>((static_cast<A>(dy) - mean_dy - deviation * slope) * scale);
}

// n contiguous values of one channel.
template <typename T>
struct GradInputPlane {
  using A = compute_t<T>;
  static SYNCBN_INLINE void run(const T* __restrict dy, const T* __restrict x, T* __restrict dx,
                                int64_t n, A center, A rest, A mean_dy, A slope, A scale) {
    for (int64_t i = 0; i < n; ++i) {
      dx[i] = grad_input_value(dy[i], x[i], center, rest, mean_dy, slope, scale);
    }
  }
};

// Rows of `width` values, one for each entry of the channel arrays.
template <typename T>
struct GradInputRows {
  using A = compute_t<T>;
  static SYNCBN_INLINE void run(const T* __restrict dy, const T* __restrict x, T* __restrict dx,
                                int64_t rows, int64_t width, const A* __restrict center,
                                const A* __restrict rest, const A* __restrict mean_dy,
                                const A* __restrict slope, const A* __restrict scale) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < width; ++c) {
        const int64_t i = r * width + c;
        dx[i] = grad_input_value(dy[i], x[i], center[c], rest[c], mean_dy[c], slope[c], scale[c]);
      }
    }
  }
};

Tensor batch_norm_backward_apply(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, std::optional<Tensor> weight,
                                 const Tensor& sums, const Tensor& count) {
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  check_grad_output(kOp, grad_output, input, geometry);
  check_statistics(kOp, "mean", mean, channels, input);
  check_statistics(kOp, "invstd", invstd, channels, input);
  check_channel_vector(kOp, "weight", weight, input);
  check_statistics(kOp, "sums", sums, 2 * channels, input);
  check_statistics(kOp, "count", count, 1, input);

  const auto* means = static_cast<const double*>(mean.const_data_ptr());
  const auto* invstds = static_cast<const double*>(invstd.const_data_ptr());
  const auto* totals = static_cast<const double*>(sums.const_data_ptr());
  // A group without values has no gradient to normalise; its sums are zero.
  const double n = std::max(*static_cast<const double*>(count.const_data_ptr()), 1.0);
  const auto weights = read_channels(weight, channels, 1);
  Tensor grad_input = torch::stable::empty_like(input);

  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = compute_t<T>;
    const auto* dy = static_cast<const T*>(grad_output.const_data_ptr());
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    auto* dx = static_cast<T*>(grad_input.mutable_data_ptr());
    const auto center = channel_array<A>(geometry, [&](int64_t c) { return means[c]; });
    const auto rest =
        channel_array<A>(geometry, [&](int64_t c) { return means[c] - static_cast<A>(means[c]); });
    const auto mean_dy = channel_array<A>(geometry, [&](int64_t c) { return totals[c] / n; });
    const auto slope = channel_array<A>(
        geometry, [&](int64_t c) { return invstds[c] * totals[channels + c] / n; });
    const auto scale =
        channel_array<A>(geometry, [&](int64_t c) { return weights[c] * invstds[c]; });
    if (geometry.is_matrix()) {
      for_each_row_range(geometry, [&](int64_t first, int64_t rows, int64_t width) {
        run<GradInputRows<T>>(dy + first, x + first, dx + first, rows, width, center.data(),
                              rest.data(), mean_dy.data(), slope.data(), scale.data());
      });
    } else {
      for_each_plane(geometry, [&](int64_t c, int64_t first, int64_t values) {
        run<GradInputPlane<T>>(dy + first, x + first, dx + first, values, center[c], rest[c],
                               mean_dy[c], slope[c], scale[c]);
      });
    }
  });
  return grad_input;
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_backward_apply", TORCH_BOX(&syncbn::cpu::batch_norm_backward_apply));
}
