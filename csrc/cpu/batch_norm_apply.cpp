// batch_norm_apply on the CPU: statistics and running statistics per channel, then one pass over
// the input, which reads it and writes the output once each.
//
// float32's rounding of a large mean would show in x - mean: x - center is subtracted, with the
// float next to the mean, and what that leaves of the mean is part of the shift.

#include <cmath>
#include <vector>

#include "../common/checks.h"
#include "../common/dispatch.h"
#include "../common/moments.h"
#include "channel_vector.h"
#include "elementwise.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_apply";

template <typename A>
struct Normalize {
  static constexpr int kInputs = 1;
  static constexpr int kConstants = 3;
  A center;
  A scale;
  A shift;

  SYNCBN_INLINE A operator()(A x) const { return (x - center) * scale + shift; }
};

// Moves the running statistics and the batch counter. Where they would not be finite, a channel
// keeps its own: one overflowed step under loss scaling must not spoil the model for good.
void update_running(const std::vector<Moments>& moments, std::optional<Tensor>& running_mean,
                    std::optional<Tensor>& running_var, std::optional<Tensor>& num_batches_tracked,
                    std::optional<double> momentum) {
  const double count = moments[0].count;
  if (count == 0) {
    return;
  }
  double factor = momentum.value_or(0);
  if (num_batches_tracked.has_value()) {
    auto* tracked = static_cast<int64_t*>(num_batches_tracked->mutable_data_ptr());
    *tracked += 1;
    if (!momentum.has_value()) {
      factor = 1.0 / static_cast<double>(*tracked);
    }
  }
  if (!running_mean.has_value()) {
    return;
  }
  const auto channels = static_cast<int64_t>(moments.size());
  auto means = read_channels(running_mean, channels, 0);
  auto variances = read_channels(running_var, channels, 0);
  const double largest_mean = largest_finite(running_mean->scalar_type());
  const double largest_variance = largest_finite(running_var->scalar_type());
  for (int64_t c = 0; c < channels; ++c) {
    const double unbiased = moments[c].m2 / std::max(count - 1, 1.0);
    const double new_mean = (1 - factor) * means[c] + factor * moments[c].mean;
    const double new_variance = (1 - factor) * variances[c] + factor * unbiased;
    if (std::abs(new_mean) <= largest_mean && new_variance <= largest_variance) {
      means[c] = new_mean;
      variances[c] = new_variance;
    }
  }
  write_channels(*running_mean, means);
  write_channels(*running_var, variances);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_apply(
    const Tensor& input, const Tensor& totals, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> running_mean,
    std::optional<Tensor> running_var, std::optional<Tensor> num_batches_tracked,
    std::optional<double> momentum, double eps) {
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  check_statistics(kOp, "totals", totals, 2 * channels + 1, input);
  check_channel_vector(kOp, "weight", weight, input);
  check_channel_vector(kOp, "bias", bias, input);
  check_running(kOp, running_mean, running_var, num_batches_tracked, momentum, input);

  const auto* sums = static_cast<const double*>(totals.const_data_ptr());
  SYNCBN_CHECK(!std::isnan(sums[2 * channels]),
               "another rank of the process group withdrew from this forward pass because of an "
               "error; that rank's own message says which");

  Tensor output = torch::stable::empty_like(input);
  Tensor mean = torch::stable::new_empty(totals, {channels});
  Tensor invstd = torch::stable::new_empty(totals, {channels});
  Tensor count = torch::stable::new_empty(totals, {1});
  auto* means = static_cast<double*>(mean.mutable_data_ptr());
  auto* invstds = static_cast<double*>(invstd.mutable_data_ptr());
  *static_cast<double*>(count.mutable_data_ptr()) = sums[2 * channels];

  std::vector<Moments> moments(channels);
  for (int64_t c = 0; c < channels; ++c) {
    moments[c] = read_message(sums, channels, c);
    means[c] = moments[c].mean;
    invstds[c] = 1 / std::sqrt(moments[c].m2 / std::max(moments[c].count, 1.0) + eps);
  }
  update_running(moments, running_mean, running_var, num_batches_tracked, momentum);

  const auto weights = read_channels(weight, channels, 1);
  const auto biases = read_channels(bias, channels, 0);
  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    auto* y = static_cast<T*>(output.mutable_data_ptr());
    elementwise<Normalize>(geometry, std::array{x}, y, [&](int k, int64_t c) {
      const double center = static_cast<compute_t<T>>(means[c]);
      const double scale = weights[c] * invstds[c];
      return k == 0 ? center : k == 1 ? scale : biases[c] - (means[c] - center) * scale;
    });
  });
  return {output, mean, invstd, count};
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_apply", TORCH_BOX(&syncbn::cpu::batch_norm_apply));
}
