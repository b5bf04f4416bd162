// batch_norm_backward_apply for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_backward_apply.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {

Tensor batch_norm_backward_apply(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, std::optional<Tensor> weight,
                                 const Tensor& sums, const Tensor& count,
                                 std::optional<double> fingerprint_sum,
                                 std::optional<Tensor> status, std::optional<Tensor> constants,
                                 int64_t activation, double negative_slope,
                                 std::optional<Tensor> mask) {
  constexpr const char* kOp = "syncbn::batch_norm_backward_apply";
  const Device device(kOp, input);
  check_no_mask(kOp, mask);
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  check_like_input(kOp, "grad_output", grad_output, input, geometry);
  check_statistics(kOp, "mean", mean, channels, input);
  check_statistics(kOp, "invstd", invstd, channels, input);
  check_channel_vector(kOp, "weight", weight, input);
  const Expectation expectation = to_expectation(fingerprint_sum);
  check_sums(kOp, "sums", sums, 2 * channels, expectation, input);
  check_statistics(kOp, "count", count, 1, input);
  EpilogueGradient epilogue{
      check_gradient_sources(kOp, input, constants, activation, negative_slope)};
  epilogue.constants = static_cast<const double*>(to_data(constants));

  Tensor grad_input = allocate_like(input);
  if (geometry.numel() == 0) {
    return grad_input;
  }
  const void* dy = grad_output.const_data_ptr();
  const void* x = input.const_data_ptr();
  void* dx = grad_input.mutable_data_ptr();
  const Plan plan =
      make_plan(geometry, to_dtype(input.scalar_type()), {dy, x, dx}, device.multiprocessors());
  launch_batch_norm_backward_apply(
      plan, device.stream(), dy, x, static_cast<const double*>(mean.const_data_ptr()),
      static_cast<const double*>(invstd.const_data_ptr()), to_channel_input(weight),
      static_cast<const double*>(sums.const_data_ptr()),
      Verifier{expectation, to_status(kOp, status)},
      static_cast<const double*>(count.const_data_ptr()), dx, epilogue);
  return grad_input;
}

}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_backward_apply", TORCH_BOX(&syncbn::cuda::batch_norm_backward_apply));
}
