// batch_norm_backward_apply on the CPU: one pass, which reads dy and x and writes dx once each.

#include "../common/allocate.h"
#include "../common/channel_constants.h"
#include "../common/checks.h"
#include "channel_vector.h"
#include "dispatch.h"
#include "elementwise.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_backward_apply";

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

// What is computed for each channel. Every array has `channels` entries; `constants` are four such
// arrays one after the other, in the order of GradInput.
struct PerChannel {
  int64_t channels;
  double count;
  bool in_float;
  const double* means;
  const double* invstds;
  const double* sums;  // of dy, and of dy * xhat after them
  const double* weights;
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
      const double center = p.in_float ? static_cast<float>(p.means[c]) : p.means[c];
      const GradInputConstants constants =
          grad_input_constants(p.means[c], center, p.invstds[c], p.weights[c], p.sums[c],
                               p.sums[p.channels + c], p.count);
      centers[c] = constants.center;
      slopes[c] = constants.slope;
      shifts[c] = constants.shift;
      scales[c] = constants.scale;
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

  std::vector<double> values((1 + GradInput<Pack<double, Baseline>>::kConstants) * channels);
  double* const weights = values.data();
  double* const constants = weights + channels;
  load_channels(weight, channels, 1, weights);
  const PerChannel job{channels,
                       std::max(*static_cast<const double*>(count.const_data_ptr()), 1.0),
                       input.scalar_type() != ScalarType::Double,
                       static_cast<const double*>(mean.const_data_ptr()),
                       static_cast<const double*>(invstd.const_data_ptr()),
                       static_cast<const double*>(sums.const_data_ptr()),
                       weights,
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
