// batch_norm_apply for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_apply.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {

ForwardResults batch_norm_apply(const ForwardArguments& a) {
  const Geometry geometry = check_apply(a);
  check_no_mask(a.mask);
  const Tensor& input = a.input;
  const Device device(input);
  const int64_t channels = geometry.channels;
  Epilogue epilogue{to_activation(a.activation, a.negative_slope), to_data(a.residual)};
  if (a.constants.has_value()) {
    epilogue.constants = static_cast<double*>(a.constants->mutable_data_ptr());
  }

  Tensor output = allocate_like(input);
  Tensor mean = allocate_vector(channels, ScalarType::Double, input);
  Tensor invstd = allocate_vector(channels, ScalarType::Double, input);
  Tensor count = allocate_vector(1, ScalarType::Double, input);
  RunningStatistics running{to_channel_output(a.running_mean), to_channel_output(a.running_var)};
  if (a.num_batches_tracked.has_value()) {
    running.num_batches_tracked = static_cast<int64_t*>(a.num_batches_tracked->mutable_data_ptr());
    running.cumulative = !a.momentum.has_value();
  }
  std::optional<Tensor> num_batches_before;
  if (running.cumulative) {
    num_batches_before = allocate_vector(1, ScalarType::Long, input);
    running.num_batches_before = static_cast<int64_t*>(num_batches_before->mutable_data_ptr());
  }
  running.momentum = a.momentum.value_or(0);

  const void* x = input.const_data_ptr();
  void* y = output.mutable_data_ptr();
  const Plan plan = make_plan(kElementwise, geometry, to_dtype(input.scalar_type()),
                              {x, epilogue.residual, y}, device.multiprocessors());
  launch_batch_norm_apply(
      plan, device.stream(), x, static_cast<const double*>(required(a.totals).const_data_ptr()),
      Verifier{a.expectation, to_status(a.status)}, to_channel_input(a.weight),
      to_channel_input(a.bias), running, a.eps, y, static_cast<double*>(mean.mutable_data_ptr()),
      static_cast<double*>(invstd.mutable_data_ptr()),
      static_cast<double*>(count.mutable_data_ptr()), epilogue);
  return {output, mean, invstd, count};
}

}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_apply", &syncbn::boxed<syncbn::read_apply, syncbn::cuda::batch_norm_apply>);
}
