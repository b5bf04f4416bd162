// batch_norm_apply on the CPU: statistics and running statistics per channel, then one pass that
// reads input and residual and writes the output.

#include <cmath>

#include "../common/allocate.h"
#include "../common/checks.h"
#include "../common/formulas.h"
#include "../common/message.h"
#include "../common/operators.h"
#include "../common/running.h"
#include "activations.h"
#include "channel_vector.h"
#include "dispatch.h"
#include "elementwise.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_apply";

// The work for each channel. Each pointer except `totals` is an array of one value per channel.
struct PerChannel {
  int64_t channels = 0;
  const double* totals = nullptr;  // the message
  double eps = 0;
  const double* weights = nullptr;
  const double* biases = nullptr;
  bool in_float = false;  // the type of the element-wise computation
  double* means = nullptr;
  double* invstds = nullptr;
  Normalize<double*> constants = {};
  // Null if they are not updated.
  double* running_means = nullptr;
  double* running_variances = nullptr;
  double factor = 0;
  bool cumulative = false;
  double largest_mean = 0;
  double largest_variance = 0;

  template <typename Isa>
  static SYNCBN_INLINE void run(const PerChannel* shared) {
    const PerChannel p = *shared;  // a local copy, which stores cannot change
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < p.channels; ++c) {
      const Moments<double> moments = read_message(p.totals, p.channels, c);
      p.means[c] = moments.mean;
      p.invstds[c] = 1 / std::sqrt(moments.variance() + p.eps);
      if (p.running_means != nullptr) {
        update_running(p.running_means[c], p.running_variances[c], moments, p.factor, p.cumulative,
                       p.largest_mean, p.largest_variance);
      }
    }
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < p.channels; ++c) {
      const double center = p.in_float ? static_cast<float>(p.means[c]) : p.means[c];
      const Normalize<double> constants =
          normalize_constants(p.means[c], center, p.invstds[c], p.weights[c], p.biases[c]);
      p.constants.center[c] = constants.center;
      p.constants.scale[c] = constants.scale;
      p.constants.shift[c] = constants.shift;
    }
  }
};

// Counts the batch and returns its share in the running statistics.
double count_batch(std::optional<Tensor>& num_batches_tracked,
                   const std::optional<double>& momentum) {
  if (!num_batches_tracked.has_value()) {
    return momentum.value_or(0);
  }
  auto* tracked = static_cast<int64_t*>(num_batches_tracked->mutable_data_ptr());
  *tracked += 1;
  return momentum.has_value() ? *momentum : 1.0 / static_cast<double>(*tracked);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_apply(
    const Tensor& input, const Tensor& totals, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> running_mean,
    std::optional<Tensor> running_var, std::optional<Tensor> num_batches_tracked,
    std::optional<double> momentum, double eps, std::optional<double> fingerprint_sum,
    std::optional<Tensor> /*status*/, std::optional<Tensor> residual, int64_t activation,
    double negative_slope, std::optional<Tensor> constants, std::optional<Tensor> mask) {
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  const Expectation expectation = to_expectation(fingerprint_sum);
  check_sums(kOp, "totals", totals, 2 * channels + 1, expectation, input);
  check_channel_vector(kOp, "weight", weight, input);
  check_channel_vector(kOp, "bias", bias, input);
  check_running(kOp, running_mean, running_var, num_batches_tracked, momentum, input);
  check_like_input(kOp, "residual", residual, input, geometry);
  const ActivationChoice choice = to_activation(kOp, activation, negative_slope);
  check_constants(kOp, constants, input);
  const uint8_t* const mask_data = check_mask(kOp, mask, input, geometry);

  const auto* message = static_cast<const double*>(totals.const_data_ptr());
  const double group_count = message[2 * channels];
  check_status(read_status(message, channels, expectation));
  if (expectation.present) {
    check_more_than_one_value(group_count);
  }

  Tensor output = allocate_like(input);
  Tensor mean = allocate_vector(channels, ScalarType::Double, input);
  Tensor invstd = allocate_vector(channels, ScalarType::Double, input);
  Tensor count = allocate_vector(1, ScalarType::Double, input);
  *static_cast<double*>(count.mutable_data_ptr()) = group_count;

  ChannelArrays arrays(/*capacity=*/7, channels);
  PerChannel work;
  work.channels = channels;
  work.totals = message;
  work.eps = eps;
  work.weights = arrays.load(weight, 1);
  work.biases = arrays.load(bias, 0);
  work.in_float = input.scalar_type() != ScalarType::Double;
  work.means = static_cast<double*>(mean.mutable_data_ptr());
  work.invstds = static_cast<double*>(invstd.mutable_data_ptr());
  work.constants.center = arrays.add();
  work.constants.scale = arrays.add();
  work.constants.shift = arrays.add();

  const double factor = group_count == 0 ? 0 : count_batch(num_batches_tracked, momentum);
  const bool updates = running_mean.has_value() && group_count != 0;
  if (updates) {
    work.running_means = arrays.load(running_mean, 0);
    work.running_variances = arrays.load(running_var, 0);
    work.factor = factor;
    work.cumulative = !momentum.has_value();
    work.largest_mean = largest_finite(to_dtype(running_mean->scalar_type()));
    work.largest_variance = largest_finite(to_dtype(running_var->scalar_type()));
  }
  dispatch_unfused<PerChannel>(&work);  // the same bits on ranks with different processors
  if (updates) {
    store_channels(*running_mean, work.running_means);
    store_channels(*running_var, work.running_variances);
  }

  double* const center = work.constants.center;
  double* const scale = work.constants.scale;
  double* const shift = work.constants.shift;
  if (constants.has_value()) {
    auto* values = static_cast<double*>(constants->mutable_data_ptr());
    std::copy(shift, shift + channels, std::copy(scale, scale + channels, values));
  }
  const DType dtype = to_dtype(input.scalar_type());
  dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    auto* y = static_cast<T*>(output.mutable_data_ptr());
    dispatch_activation<compute_t<T>>(choice, dtype, [&](auto act) {
      using Act = decltype(act);
      if (residual.has_value()) {
        const auto* r = static_cast<const T*>(residual->const_data_ptr());
        elementwise<NormalizeWithEpilogue<Act, true>::template Formula, T>(
            geometry, mask_data, {x, r}, y, {center, scale, shift, act});
      } else {
        elementwise<NormalizeWithEpilogue<Act, false>::template Formula, T>(
            geometry, mask_data, {x}, y, {center, scale, shift, act});
      }
    });
  });
  return {output, mean, invstd, count};
}

}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_apply", TORCH_BOX(&syncbn::cpu::batch_norm_apply));
}
