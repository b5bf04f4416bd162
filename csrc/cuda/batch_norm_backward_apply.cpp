// batch_norm_backward_apply for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_backward_apply.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {

BackwardApplyResults batch_norm_backward_apply(const BackwardArguments& a) {
  const Geometry geometry = check_backward_apply(a);
  check_no_mask(a.mask);
  const Tensor& input = a.input;
  const Device device(input);
  EpilogueGradient epilogue{check_activation_gradient(a, geometry)};
  epilogue.constants = static_cast<const double*>(to_data(a.constants));

  Tensor grad_input = allocate_like(input);
  const void* dy = a.grad_output.const_data_ptr();
  const void* x = input.const_data_ptr();
  void* dx = grad_input.mutable_data_ptr();
  const Plan plan = make_plan(kElementwise, geometry, to_dtype(input.scalar_type()), {dy, x, dx},
                              device.multiprocessors());
  launch_batch_norm_backward_apply(
      plan, device.stream(), dy, x, static_cast<const double*>(a.mean.const_data_ptr()),
      static_cast<const double*>(a.invstd.const_data_ptr()), to_channel_input(a.weight),
      static_cast<const double*>(required(a.sums).const_data_ptr()),
      Verifier{a.expectation, to_status(a.status)},
      static_cast<const double*>(required(a.count).const_data_ptr()), dx, epilogue);
  return {grad_input};
}

}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_backward_apply",
         &syncbn::boxed<syncbn::read_backward_apply, syncbn::cuda::batch_norm_backward_apply>);
}
