// batch_norm_backward_reduce for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_backward_reduce.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {
namespace {

// Both operators; batch_norm_backward_reduce_dz passes `dz`.
std::tuple<Tensor, Tensor, Tensor> reduce(
    const char* op, const Tensor& grad_output, const Tensor& input, const Tensor& mean,
    const Tensor& invstd, ScalarType weight_dtype, ScalarType bias_dtype,
    std::optional<double> fingerprint, double next_size, const std::optional<Tensor>& constants,
    int64_t activation, double negative_slope, const std::optional<Tensor>& residual = {},
    const std::optional<Tensor>& output = {}, const std::optional<Tensor>& dz = {}) {
  const Device device(op, input);
  const Geometry geometry = check_input(op, "input", input);
  const int64_t channels = geometry.channels;
  check_like_input(op, "grad_output", grad_output, input, geometry);
  check_statistics(op, "mean", mean, channels, input);
  check_statistics(op, "invstd", invstd, channels, input);
  check_grad_dtype(op, "weight_dtype", weight_dtype);
  check_grad_dtype(op, "bias_dtype", bias_dtype);
  EpilogueGradient epilogue;
  if (dz.has_value()) {
    epilogue.activation = check_stored_sources(op, input, geometry, constants, activation,
                                               negative_slope, residual, output);
    SYNCBN_CHECK(residual.has_value() || output.has_value(), op,
                 ": expected a residual; without it CUDA kernels store no gradient");
    epilogue.dz = dz->mutable_data_ptr();
  } else {
    epilogue.activation = check_gradient_sources(op, input, constants, activation, negative_slope);
  }
  epilogue.constants = static_cast<const double*>(to_data(constants));
  epilogue.residual = to_data(residual);
  epilogue.output = to_data(output);

  const Tail tail = to_tail(fingerprint, next_size);
  const int64_t size = tail.present ? size_with_tail(channels) : 2 * channels;
  Tensor sums = allocate_vector(size, ScalarType::Double, input);
  Tensor grad_weight = allocate_vector(channels, weight_dtype, input);
  Tensor grad_bias = allocate_vector(channels, bias_dtype, input);

  const void* dy = grad_output.const_data_ptr();
  const void* x = input.const_data_ptr();
  const Plan plan =
      make_plan(geometry, to_dtype(input.scalar_type()),
                {dy, x, epilogue.residual, epilogue.output, epilogue.dz}, device.multiprocessors());
  std::vector<Tensor> keep_alive;
  launch_batch_norm_backward_reduce(
      plan, device.stream(), dy, x, static_cast<const double*>(mean.const_data_ptr()),
      static_cast<const double*>(invstd.const_data_ptr()),
      static_cast<double*>(sums.mutable_data_ptr()), tail, to_channel_output(grad_weight),
      to_channel_output(grad_bias), device.make_workspace(plan, input, keep_alive), epilogue);
  return {sums, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce_dz(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    ScalarType weight_dtype, ScalarType bias_dtype, std::optional<double> fingerprint,
    double next_size, std::optional<Tensor> constants, int64_t activation, double negative_slope,
    std::optional<Tensor> residual, std::optional<Tensor> output, std::optional<Tensor> mask) {
  constexpr const char* kOp = "syncbn::batch_norm_backward_reduce_dz";
  const Device device(kOp, input);
  check_no_mask(kOp, mask);
  check_input(kOp, "input", input);
  const Tensor dz = allocate_like(input);
  auto [sums, grad_weight, grad_bias] =
      reduce(kOp, grad_output, input, mean, invstd, weight_dtype, bias_dtype, fingerprint,
             next_size, constants, activation, negative_slope, residual, output, dz);
  return {sums, grad_weight, grad_bias, dz};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    ScalarType weight_dtype, ScalarType bias_dtype, std::optional<double> fingerprint,
    double next_size, std::optional<Tensor> constants, int64_t activation, double negative_slope,
    std::optional<Tensor> mask) {
  check_no_mask("syncbn::batch_norm_backward_reduce", mask);
  return reduce("syncbn::batch_norm_backward_reduce", grad_output, input, mean, invstd,
                weight_dtype, bias_dtype, fingerprint, next_size, constants, activation,
                negative_slope);
}

}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&syncbn::cuda::batch_norm_backward_reduce));
  m.impl("batch_norm_backward_reduce_dz", TORCH_BOX(&syncbn::cuda::batch_norm_backward_reduce_dz));
}
