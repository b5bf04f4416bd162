// batch_norm_apply on the CPU: statistics and running statistics per channel, then one pass that
// reads input and residual and writes the output.

#include <cmath>

#include "../common/allocate.h"
#include "../common/formulas.h"
#include "../common/operators.h"
#include "../common/running.h"
#include "activations.h"
#include "channel_vector.h"
#include "dispatch.h"
#include "elementwise.h"

namespace syncbn::cpu {
namespace {

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
double count_batch(const ForwardArguments& a) {
  if (!a.num_batches_tracked.has_value()) {
    return a.momentum.value_or(0);
  }
  auto* tracked = static_cast<int64_t*>(a.num_batches_tracked->mutable_data_ptr());
  *tracked += 1;
  return a.momentum.has_value() ? *a.momentum : 1.0 / static_cast<double>(*tracked);
}

}  // namespace

ForwardResults batch_norm_apply(const ForwardArguments& a) {
  const Geometry geometry = check_apply(a);
  const Tensor& input = a.input;
  const int64_t channels = geometry.channels;
  const ActivationChoice choice = to_activation(a.activation, a.negative_slope);
  const uint8_t* const mask_data = check_mask(a.mask, input, geometry);

  const auto* message = static_cast<const double*>(required(a.totals).const_data_ptr());
  const double group_count = message[2 * channels];
  check_status(read_status(message + 2 * channels, a.expectation));
  if (a.expectation.present) {
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
  work.eps = a.eps;
  work.weights = arrays.load(a.weight, 1);
  work.biases = arrays.load(a.bias, 0);
  work.in_float = input.scalar_type() != ScalarType::Double;
  work.means = static_cast<double*>(mean.mutable_data_ptr());
  work.invstds = static_cast<double*>(invstd.mutable_data_ptr());
  work.constants.center = arrays.add();
  work.constants.scale = arrays.add();
  work.constants.shift = arrays.add();

  const double factor = group_count == 0 ? 0 : count_batch(a);
  const bool updates = a.running_mean.has_value() && a.running_var.has_value() && group_count != 0;
  if (updates) {
    work.running_means = arrays.load(a.running_mean, 0);
    work.running_variances = arrays.load(a.running_var, 0);
    work.factor = factor;
    work.cumulative = !a.momentum.has_value();
    work.largest_mean = largest_finite(to_dtype(a.running_mean->scalar_type()));
    work.largest_variance = largest_finite(to_dtype(a.running_var->scalar_type()));
  }
  dispatch_unfused<PerChannel>(&work);  // the same bits on ranks with different processors
  if (updates) {
    store_channels(*a.running_mean, work.running_means);
    store_channels(*a.running_var, work.running_variances);
  }

  double* const center = work.constants.center;
  double* const scale = work.constants.scale;
  double* const shift = work.constants.shift;
  if (a.constants.has_value()) {
    auto* values = static_cast<double*>(a.constants->mutable_data_ptr());
    std::copy(shift, shift + channels, std::copy(scale, scale + channels, values));
  }
  const DType dtype = to_dtype(input.scalar_type());
  dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    auto* y = static_cast<T*>(output.mutable_data_ptr());
    dispatch_activation<compute_t<T>>(choice, dtype, [&](auto act) {
      using Act = decltype(act);
      if (a.residual.has_value()) {
        const auto* r = static_cast<const T*>(a.residual->const_data_ptr());
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
  m.impl("batch_norm_apply", &syncbn::boxed<syncbn::read_apply, syncbn::cpu::batch_norm_apply>);
}
