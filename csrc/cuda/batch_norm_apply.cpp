// batch_norm_apply for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_apply.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_apply(
    const Tensor& input, const Tensor& totals, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> running_mean,
    std::optional<Tensor> running_var, std::optional<Tensor> num_batches_tracked,
    std::optional<double> momentum, double eps, std::optional<double> fingerprint_sum,
    std::optional<Tensor> status, std::optional<Tensor> residual, int64_t activation,
    double negative_slope, std::optional<Tensor> constants, std::optional<Tensor> mask) {
  constexpr const char* kOp = "syncbn::batch_norm_apply";
  const Device device(kOp, input);
  check_no_mask(kOp, mask);
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  const Expectation expectation = to_expectation(fingerprint_sum);
  check_sums(kOp, "totals", totals, 2 * channels + 1, expectation, input);
  check_channel_vector(kOp, "weight", weight, input);
  check_channel_vector(kOp, "bias", bias, input);
  check_running(kOp, running_mean, running_var, num_batches_tracked, momentum, input);
  check_like_input(kOp, "residual", residual, input, geometry);
  Epilogue epilogue{to_activation(kOp, activation, negative_slope), to_data(residual)};
  check_constants(kOp, constants, input);
  if (constants.has_value()) {
    epilogue.constants = static_cast<double*>(constants->mutable_data_ptr());
  }

  Tensor output = allocate_like(input);
  Tensor mean = allocate_vector(channels, ScalarType::Double, input);
  Tensor invstd = allocate_vector(channels, ScalarType::Double, input);
  Tensor count = allocate_vector(1, ScalarType::Double, input);
  RunningStatistics running{to_channel_output(running_mean), to_channel_output(running_var)};
  if (num_batches_tracked.has_value()) {
    running.num_batches_tracked = static_cast<int64_t*>(num_batches_tracked->mutable_data_ptr());
    running.cumulative = !momentum.has_value();
  }
  running.momentum = momentum.value_or(0);

  const void* x = input.const_data_ptr();
  void* y = output.mutable_data_ptr();
  const Plan plan = make_plan(geometry, to_dtype(input.scalar_type()), {x, epilogue.residual, y},
                              device.multiprocessors());
  launch_batch_norm_apply(
      plan, device.stream(), x, static_cast<const double*>(totals.const_data_ptr()),
      Verifier{expectation, to_status(kOp, status)}, to_channel_input(weight),
      to_channel_input(bias), running, eps, y, static_cast<double*>(mean.mutable_data_ptr()),
      static_cast<double*>(invstd.mutable_data_ptr()),
      static_cast<double*>(count.mutable_data_ptr()), epilogue);
  return {output, mean, invstd, count};
}

}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_apply", TORCH_BOX(&syncbn::cuda::batch_norm_apply));
}
