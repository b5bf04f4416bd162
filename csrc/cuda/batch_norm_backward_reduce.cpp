// batch_norm_backward_reduce for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_backward_reduce.cu on the current stream.

#include "adapter.h"

namespace syncbn::cuda {
namespace {

constexpr const char* kOp = "syncbn::batch_norm_backward_reduce";

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    ScalarType weight_dtype, ScalarType bias_dtype, std::optional<double> tag, double outlook,
    std::optional<Tensor> constants, int64_t activation, double /*negative_slope*/) {
  const Device device(input);
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  check_like_input(kOp, "grad_output", grad_output, input, geometry);
  check_unfused(kOp, activation, constants.has_value());
  check_statistics(kOp, "mean", mean, channels, input);
  check_statistics(kOp, "invstd", invstd, channels, input);
  check_grad_dtype(kOp, "weight_dtype", weight_dtype);
  check_grad_dtype(kOp, "bias_dtype", bias_dtype);

  const Announcement announcement = to_announcement(tag, outlook);
  const int64_t size = announcement.present ? announced_size(channels) : 2 * channels;
  Tensor sums = allocate_vector(size, ScalarType::Double, input);
  Tensor grad_weight = allocate_vector(channels, weight_dtype, input);
  Tensor grad_bias = allocate_vector(channels, bias_dtype, input);

  const void* dy = grad_output.const_data_ptr();
  const void* x = input.const_data_ptr();
  const Plan plan =
      make_plan(geometry, to_dtype(input.scalar_type()), {dy, x}, device.multiprocessors());
  std::vector<Tensor> keep_alive;
  launch_batch_norm_backward_reduce(
      plan, device.stream(), dy, x, static_cast<const double*>(mean.const_data_ptr()),
      static_cast<const double*>(invstd.const_data_ptr()),
      static_cast<double*>(sums.mutable_data_ptr()), announcement, to_channel_output(grad_weight),
      to_channel_output(grad_bias), device.make_workspace(plan, input, keep_alive));
  return {sums, grad_weight, grad_bias};
}

}  // namespace
}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&syncbn::cuda::batch_norm_backward_reduce));
}
