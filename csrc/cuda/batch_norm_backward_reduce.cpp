// batch_norm_backward_reduce for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_backward_reduce.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {

ReduceResults batch_norm_backward_reduce(const BackwardArguments& a) {
  const Geometry geometry = check_reduce(a);
  check_no_mask(a.mask);
  const Tensor& input = a.input;
  const Device device(input);
  const int64_t channels = geometry.channels;
  EpilogueGradient epilogue;
  epilogue.activation = check_activation_gradient(a, geometry);
  if (a.dz.has_value()) {
    SYNCBN_CHECK(a.residual.has_value() || a.output.has_value(),
                 "expected a residual; without it CUDA kernels store no gradient");
    epilogue.dz = a.dz->mutable_data_ptr();
  }
  epilogue.constants = static_cast<const double*>(to_data(a.constants));
  epilogue.residual = to_data(a.residual);
  epilogue.output = to_data(a.output);

  const Tail tail = read_tail(a.tail);
  const int64_t size = tail.present ? size_with_tail(channels) : 2 * channels;
  Tensor sums = allocate_vector(size, ScalarType::Double, input);
  Tensor grad_weight = allocate_vector(channels, a.weight_dtype, input);
  Tensor grad_bias = allocate_vector(channels, a.bias_dtype, input);

  const void* dy = a.grad_output.const_data_ptr();
  const void* x = input.const_data_ptr();
  const Plan plan =
      make_plan(kReduction, geometry, to_dtype(input.scalar_type()),
                {dy, x, epilogue.residual, epilogue.output, epilogue.dz}, device.multiprocessors());
  std::vector<Tensor> keep_alive;
  launch_batch_norm_backward_reduce(
      plan, device.stream(), dy, x, static_cast<const double*>(a.mean.const_data_ptr()),
      static_cast<const double*>(a.invstd.const_data_ptr()),
      static_cast<double*>(sums.mutable_data_ptr()), tail, to_channel_output(grad_weight),
      to_channel_output(grad_bias), device.make_workspace(plan, input, keep_alive), epilogue);
  return {sums, grad_weight, grad_bias};
}

}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  using namespace syncbn;
  m.impl("batch_norm_backward_reduce", &boxed<read_reduce, cuda::batch_norm_backward_reduce>);
  m.impl("batch_norm_backward_reduce_dz",
         &boxed<read_reduce_dz, reduce_dz<cuda::batch_norm_backward_reduce>>);
}
