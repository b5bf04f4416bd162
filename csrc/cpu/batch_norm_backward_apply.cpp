// batch_norm_backward_apply on the CPU: one pass, which reads dy and x and writes dx once each.

#include "../common/allocate.h"
#include "../common/checks.h"
#include "../common/dispatch.h"
#include "channel_vector.h"
#include "elementwise.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_backward_apply";

// (dy - sum(dy) / count - (x - mean) * invstd * sum(dy * xhat) / count) * scale, where scale is
// weight * invstd, with all factors multiplied out. x - center is subtracted, with the float next
// to the mean; what that leaves of the mean is part of the shift.
template <typename P>
struct GradInput {
  static constexpr int kInputs = 2;
  static constexpr int kConstants = 4;
  P center;
  P slope;
  P shift;
  P scale;

  SYNCBN_INLINE P operator()(const P& dy, const P& x) const {
    return dy * scale + ((x - center) * slope + shift);
  }
};

// Of each channel: `constants` are, one after the other, what GradInput holds.
struct PerChannel {
  const double* means;
  const double* invstds;
  const double* sums;
  const double* weights;
  double count;
  int64_t channels;
  bool in_float;
  double* constants;

  template <typename Isa>
  static SYNCBN_INLINE void run(const PerChannel* job) {
    const PerChannel p = *job;
    double* const centers = p.constants;
    double* const slopes = centers + p.channels;
    double* const shifts = slopes + p.channels;
    double* const scales = shifts + p.channels;
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < p.channels; ++c) {
      centers[c] = p.in_float ? static_cast<float>(p.means[c]) : p.means[c];
      scales[c] = p.weights[c] * p.invstds[c];
      slopes[c] = -scales[c] * p.invstds[c] * (p.sums[p.channels + c] / p.count);
      shifts[c] = -scales[c] * (p.sums[c] / p.count) - (p.means[c] - centers[c]) * slopes[c];
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
  std::vector<double> values(5 * channels);
  double* const weights = values.data();
  double* const constants = weights + channels;
  read_channels(weight, channels, 1, weights);
  const PerChannel job{
      means,    invstds, totals, weights, n, channels, input.scalar_type() != ScalarType::Double,
      constants};
  run<PerChannel>(&job);
  Tensor grad_input = allocate_like(input);

  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* dy = static_cast<const T*>(grad_output.const_data_ptr());
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    auto* dx = static_cast<T*>(grad_input.mutable_data_ptr());
    elementwise<GradInput, T>(geometry, std::array{dy, x}, dx, constants);
  });
  return grad_input;
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_backward_apply", TORCH_BOX(&syncbn::cpu::batch_norm_backward_apply));
}
