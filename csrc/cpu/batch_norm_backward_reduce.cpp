// batch_norm_backward_reduce on the CPU.
//
// Each item of work owns a segment of positions of some channels and sums dy and
// dy * (x - center); center is the float next to the mean, and what that leaves of the mean is made
// good for once, at the end. Reads both tensors once.

#include <vector>

#include "../common/allocate.h"
#include "../common/checks.h"
#include "channel_sums.h"
#include "channel_vector.h"
#include "dispatch.h"

namespace syncbn::cpu {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_backward_reduce";

template <typename T>
struct PlanarGradSums {
  template <typename Isa>
  static SYNCBN_INLINE void run(const T* dy, const T* x, const Geometry* geometry, const Item* item,
                                compute_t<T> center, double* grad, double* deviation) {
    planar_sums<T, Isa, true>(dy, x, *geometry, *item, center, *grad, *deviation);
  }
};

template <typename T>
struct RowGradSums {
  template <typename Isa>
  static SYNCBN_INLINE void run(const T* dy, const T* x, const Geometry* geometry, const Item* item,
                                const compute_t<T>* centers, double* grads, double* deviations) {
    row_sums<T, Isa, true>(dy, x, *geometry, *item, centers, grads, deviations);
  }
};

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    ScalarType weight_dtype, ScalarType bias_dtype, std::optional<double> tag, double outlook) {
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  check_grad_output(kOp, grad_output, input, geometry);
  check_statistics(kOp, "mean", mean, channels, input);
  check_statistics(kOp, "invstd", invstd, channels, input);
  check_grad_dtype(kOp, "weight_dtype", weight_dtype);
  check_grad_dtype(kOp, "bias_dtype", bias_dtype);

  const Partition partition(geometry);
  const auto* means = static_cast<const double*>(mean.const_data_ptr());
  const auto* invstds = static_cast<const double*>(invstd.const_data_ptr());
  std::vector<double> grads(partition.segments * channels);
  std::vector<double> deviations(partition.segments * channels);
  std::vector<double> rests(channels);  // of the means, from the centers

  dispatch_dtype(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* dy = static_cast<const T*>(grad_output.const_data_ptr());
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    std::vector<compute_t<T>> centers(channels);
    for (int64_t c = 0; c < channels; ++c) {
      centers[c] = static_cast<compute_t<T>>(means[c]);
      rests[c] = means[c] - centers[c];
    }
    for_each_item(geometry, partition, [&](const Item& item) {
      double* const grad = &grads[item.segment * channels + item.channel];
      double* const deviation = &deviations[item.segment * channels + item.channel];
      if (is_in_rows(geometry)) {
        dispatch_isa<RowGradSums<T>>(dy, x, &geometry, &item, &centers[item.channel], grad,
                                     deviation);
      } else {
        dispatch_isa<PlanarGradSums<T>>(dy, x, &geometry, &item, centers[item.channel], grad,
                                        deviation);
      }
    });
  });

  // The first segment takes up the others.
  for (int64_t segment = 1; segment < partition.segments; ++segment) {
    for (int64_t c = 0; c < channels; ++c) {
      grads[c] += grads[segment * channels + c];
      deviations[c] += deviations[segment * channels + c];
    }
  }
  const Announcement announcement = to_announcement(tag, outlook);
  const int64_t size = announcement.present ? announced_size(channels) : 2 * channels;
  Tensor sums = allocate_vector(size, ScalarType::Double, input);
  auto* message = static_cast<double*>(sums.mutable_data_ptr());
  for (int64_t c = 0; c < channels; ++c) {
    deviations[c] = (deviations[c] - rests[c] * grads[c]) * invstds[c];
    message[c] = grads[c];
    message[channels + c] = deviations[c];
  }
  if (announcement.present) {
    write_end(message, channels, /*count=*/0, announcement);
  }

  Tensor grad_weight = allocate_vector(channels, weight_dtype, input);
  Tensor grad_bias = allocate_vector(channels, bias_dtype, input);
  store_channels(grad_weight, deviations.data());
  store_channels(grad_bias, grads.data());
  return {sums, grad_weight, grad_bias};
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&syncbn::cpu::batch_norm_backward_reduce));
}
