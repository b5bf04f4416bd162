// batch_norm_apply on the CPU: statistics and running statistics per channel, then one pass over
// the input, which reads it and writes the output once each.
//
// float32's rounding of a large mean would show in x - mean: x - center is subtracted, with the
// float next to the mean, and what that leaves of the mean is part of the shift.

#include <cmath>
#include <vector>

#include "../common/allocate.h"
#include "../common/checks.h"
#include "../common/dispatch.h"
#include "../common/moments.h"
#include "../common/running.h"
#include "channel_vector.h"
#include "elementwise.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_apply";

template <typename P>
struct Normalize {
  static constexpr int kInputs = 1;
  static constexpr int kConstants = 3;
  P center;
  P scale;
  P shift;

  SYNCBN_INLINE P operator()(const P& x) const { return (x - center) * scale + shift; }
};

// Of each channel, from the message and its running statistics. All of them have an entry for each
// channel, `constants` one after the other what Normalize holds.
struct PerChannel {
  const double* sums;
  int64_t channels;
  double eps;
  double* means;
  double* invstds;
  double* running_means;  // or null
  double* running_variances;
  double factor;
  double largest_mean;
  double largest_variance;
  const double* weights;
  const double* biases;
  bool in_float;
  double* constants;

  template <typename Isa>
  static SYNCBN_INLINE void run(const PerChannel* job) {
    const PerChannel p = *job;
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < p.channels; ++c) {
      const Moments moments = read_message(p.sums, p.channels, c);
      const double variance = moments.m2 / (moments.count > 1 ? moments.count : 1);
      p.means[c] = moments.mean;
      p.invstds[c] = 1 / std::sqrt(variance + p.eps);
      if (p.running_means != nullptr) {
        update_running(p.running_means[c], p.running_variances[c], moments, p.factor,
                       p.largest_mean, p.largest_variance);
      }
    }
    double* const centers = p.constants;
    double* const scales = centers + p.channels;
    double* const shifts = scales + p.channels;
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < p.channels; ++c) {
      centers[c] = p.in_float ? static_cast<float>(p.means[c]) : p.means[c];
      scales[c] = p.weights[c] * p.invstds[c];
      shifts[c] = p.biases[c] - (p.means[c] - centers[c]) * scales[c];
    }
  }
};

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

  Tensor output = allocate_like(input);
  Tensor mean = allocate_vector(channels, ScalarType::Double, input);
  Tensor invstd = allocate_vector(channels, ScalarType::Double, input);
  Tensor count = allocate_vector(1, ScalarType::Double, input);
  auto* means = static_cast<double*>(mean.mutable_data_ptr());
  auto* invstds = static_cast<double*>(invstd.mutable_data_ptr());
  *static_cast<double*>(count.mutable_data_ptr()) = sums[2 * channels];

  const double group_count = sums[2 * channels];
  double factor = momentum.value_or(0);
  if (num_batches_tracked.has_value() && group_count != 0) {
    auto* tracked = static_cast<int64_t*>(num_batches_tracked->mutable_data_ptr());
    *tracked += 1;
    if (!momentum.has_value()) {
      factor = 1.0 / static_cast<double>(*tracked);
    }
  }
  const bool updates = running_mean.has_value() && group_count != 0;
  std::vector<double> values(7 * channels);
  double* const weights = values.data();
  double* const biases = weights + channels;
  double* const running_means = biases + channels;
  double* const running_variances = running_means + channels;
  double* const constants = running_variances + channels;
  read_channels(weight, channels, 1, weights);
  read_channels(bias, channels, 0, biases);
  PerChannel job{sums,
                 channels,
                 eps,
                 means,
                 invstds,
                 nullptr,
                 nullptr,
                 factor,
                 0,
                 0,
                 weights,
                 biases,
                 input.scalar_type() != ScalarType::Double,
                 constants};
  if (updates) {
    read_channels(running_mean, channels, 0, running_means);
    read_channels(running_var, channels, 0, running_variances);
    job.running_means = running_means;
    job.running_variances = running_variances;
    job.largest_mean = largest_finite(running_mean->scalar_type());
    job.largest_variance = largest_finite(running_var->scalar_type());
  }
  run<PerChannel>(&job);
  if (updates) {
    write_channels(*running_mean, channels, running_means);
    write_channels(*running_var, channels, running_variances);
  }

  dispatch_float(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    auto* y = static_cast<T*>(output.mutable_data_ptr());
    elementwise<Normalize, T>(geometry, std::array{x}, y, constants);
  });
  return {output, mean, invstd, count};
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_apply", TORCH_BOX(&syncbn::cpu::batch_norm_apply));
}
