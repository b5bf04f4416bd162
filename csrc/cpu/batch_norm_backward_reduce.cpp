// batch_norm_backward_reduce on the CPU.
//
// Each task sums dz and dz * (x - center) over a segment of some channels. dz is dy or its product
// with the activation's derivative; center is the float next to the mean. The rest of the mean is
// taken into account at the end, once per channel. Each tensor is read once.

#include <vector>

#include "../common/allocate.h"
#include "../common/operators.h"
#include "../common/terms.h"
#include "activations.h"
#include "channel_sums.h"
#include "channel_vector.h"
#include "dispatch.h"
#include "masked_sums.h"
#include "pages.h"

namespace syncbn::cpu {
namespace {

// Computes the sums of each segment and channel, [segments][channels]. Masked positions add zeros:
// dy is zero there, and x near the mean.
template <template <typename> class Formula, typename T>
void sum_segments(const Geometry& geometry, const Partition& partition, const uint8_t* mask,
                  const SummedTensors<Formula, T>& tensors, const Formula<const double*>& constants,
                  double* grads, double* deviations) {
  using A = compute_t<T>;
  const int64_t channels = geometry.channels;
  std::vector<A> values(Formula<A>::kConstants * channels);
  A* next = values.data();
  const auto rounded = constants.map([&](const double* of_channels) -> const A* {
    A* const array = next;
    next = std::transform(of_channels, of_channels + channels, array,
                          [](double x) { return to_constant<A>(x); });
    return array;
  });
  std::vector<T> centers(mask != nullptr ? channels : 0);
  std::transform(rounded.center, rounded.center + centers.size(), centers.begin(),
                 [](A center) { return static_cast<T>(center); });
  for_each_task(geometry, partition, [&](const Task& task) {
    double* const grad = grads + task.segment * channels + task.channel;
    double* const deviation = deviations + task.segment * channels + task.channel;
    if (mask != nullptr) {
      const auto of_task = rounded.map([&](const A* values) { return values + task.channel; });
      const Fills<Formula, T> fills{nullptr, centers.data() + task.channel};
      const auto sum =
          is_in_rows(geometry) ? masked_row_sums<Formula, T> : masked_planar_sums<Formula, T>;
      sum(tensors, mask, fills, geometry, task, of_task, grad, deviation);
    } else if (is_in_rows(geometry)) {
      dispatch_isa<RowSums<Formula, T>>(&tensors, &geometry, &task, &rounded, grad, deviation);
    } else {
      dispatch_isa<PlanarSums<Formula, T>>(&tensors, &geometry, &task, &rounded, grad, deviation);
    }
  });
}

}  // namespace

ReduceResults batch_norm_backward_reduce(const BackwardArguments& a) {
  const Geometry geometry = check_reduce(a);
  const Tail tail = read_tail(a.tail);
  const Tensor& input = a.input;
  const int64_t channels = geometry.channels;
  const ActivationChoice choice = check_activation_gradient(a, geometry);
  const uint8_t* const mask_data = check_mask(a.mask, input, geometry);

  const Partition partition(geometry);
  const auto* means = static_cast<const double*>(a.mean.const_data_ptr());
  const auto* invstds = static_cast<const double*>(a.invstd.const_data_ptr());
  std::vector<double> grads(partition.segments * channels);
  std::vector<double> deviations(partition.segments * channels);

  const double* const scales =
      a.constants.has_value() ? static_cast<const double*>(a.constants->const_data_ptr()) : nullptr;
  const double* const shifts = scales + (a.constants.has_value() ? channels : 0);
  const DType dtype = to_dtype(input.scalar_type());
  dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* dy = static_cast<const T*>(a.grad_output.const_data_ptr());
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    T* dz = nullptr;
    if (a.dz.has_value()) {
      dz = static_cast<T*>(a.dz->mutable_data_ptr());
      prepare_output(dz, static_cast<int64_t>(geometry.numel() * sizeof(T)));
    }
    const auto data = [](const std::optional<Tensor>& tensor) {
      return static_cast<const T*>(tensor->const_data_ptr());
    };
    double* const g = grads.data();
    double* const d = deviations.data();
    dispatch_activation<compute_t<T>>(choice, dtype, [&](auto act) {
      using Act = decltype(act);
      if constexpr (std::is_same_v<Act, NoActivation>) {
        sum_segments<GradTerms, T>(geometry, partition, mask_data, {{dy, x}}, {means}, g, d);
        return;
      } else if constexpr (!Act::kFromOutput) {
        if (a.residual.has_value()) {
          sum_segments<GradTermsWithEpilogue<Act, true>::template Formula, T>(
              geometry, partition, mask_data, {{dy, x, data(a.residual)}, dz},
              {means, scales, shifts, act}, g, d);
          return;
        }
        if (a.dz.has_value()) {
          sum_segments<GradTermsWithEpilogue<Act, false, true>::template Formula, T>(
              geometry, partition, mask_data, {{dy, x}, dz}, {means, scales, shifts, act}, g, d);
          return;
        }
      } else if (a.output.has_value()) {
        sum_segments<GradTermsFromOutput<Act>::template Formula, T>(
            geometry, partition, mask_data, {{dy, x, data(a.output)}, dz}, {means, act}, g, d);
        return;
      }
      if constexpr (!std::is_same_v<Act, NoActivation>) {
        sum_segments<GradTermsWithEpilogue<Act, false>::template Formula, T>(
            geometry, partition, mask_data, {{dy, x}}, {means, scales, shifts, act}, g, d);
      }
    });
  });

  // The sums of the other segments are added to the sums of the first.
  for (int64_t segment = 1; segment < partition.segments; ++segment) {
    for (int64_t c = 0; c < channels; ++c) {
      grads[c] += grads[segment * channels + c];
      deviations[c] += deviations[segment * channels + c];
    }
  }
  const int64_t size = tail.present ? size_with_tail(channels) : 2 * channels;
  Tensor sums = allocate_vector(size, ScalarType::Double, input);
  auto* message = static_cast<double*>(sums.mutable_data_ptr());
  const bool in_float = dtype != DType::kDouble;
  for (int64_t c = 0; c < channels; ++c) {
    const double rest = in_float ? means[c] - static_cast<float>(means[c]) : 0;
    deviations[c] = (deviations[c] - rest * grads[c]) * invstds[c];
    message[c] = grads[c];
    message[channels + c] = deviations[c];
  }
  if (tail.present) {
    write_tail(message, channels, /*count=*/0, tail);
  }

  Tensor grad_weight = allocate_vector(channels, a.weight_dtype, input);
  Tensor grad_bias = allocate_vector(channels, a.bias_dtype, input);
  store_channels(grad_weight, deviations.data());
  store_channels(grad_bias, grads.data());
  return {sums, grad_weight, grad_bias};
}

}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn;
  m.impl("batch_norm_backward_reduce", &boxed<read_reduce, cpu::batch_norm_backward_reduce>);
  m.impl("batch_norm_backward_reduce_dz",
         &boxed<read_reduce_dz, reduce_dz<cpu::batch_norm_backward_reduce>>);
}
