// batch_norm_backward_apply on the CPU: one pass, which reads dy and x and writes dx once each.

#include "../common/checks.h"
#include "../common/dispatch.h"
#include "channel_vector.h"
#include "elementwise.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_backward_apply";

// (dy - sum(dy) / count - (x - mean) * slope) * scale, with
// slope = invstd * sum(dy * xhat) / count, scale = weight * invstd.
// x - center is subtracted, with the float next to the mean; what that leaves of the mean times
// the slope is part of the offset, -sum(dy) / count.
template <typename A>
struct GradInput {
  static constexpr int kInputs = 2;
  static constexpr int kConstants = 4;
  A center;
  A slope;
  A offset;
  A scale;

  SYNCBN_INLINE A operator()(A dy, A x) const {
    return ((dy + offset) - (x - center) * slope) * scale;
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
    const auto* dy = static_cast<const T*>(grad_output.const_data_ptr());
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    auto* dx = static_cast<T*>(grad_input.mutable_data_ptr());
    elementwise<GradInput>(geometry, std::array{dy, x}, dx, [&](int k, int64_t c) {
      const double center = static_cast<compute_t<T>>(means[c]);
      const double slope = invstds[c] * totals[channels + c] / n;
      switch (k) {
        case 0:
          return center;
        case 1:
          return slope;
        case 2:
          return (means[c] - center) * slope - totals[c] / n;
        default:
          return weights[c] * invstds[c];
      }
    });
  });
  return grad_input;
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_backward_apply", TORCH_BOX(&syncbn::cpu::batch_norm_backward_apply));
}
