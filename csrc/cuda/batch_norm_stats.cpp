// batch_norm_stats for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_stats.cu on the current stream.

#include "adapter.h"

namespace syncbn::cuda {
namespace {

Tensor batch_norm_stats(const Tensor& input) {
  const Device device(input);
  const Geometry geometry = check_input("syncbn::batch_norm_stats", "input", input);
  Tensor message = allocate_vector(2 * geometry.channels + 1, ScalarType::Double, input);
  const void* x = input.const_data_ptr();
  const Plan plan =
      make_plan(geometry, to_dtype(input.scalar_type()), {x}, device.multiprocessors());
  std::vector<Tensor> keep_alive;
  launch_batch_norm_stats(plan, device.stream(), x,
                          static_cast<double*>(message.mutable_data_ptr()),
                          device.make_workspace(plan, input, keep_alive));
  return message;
}

}  // namespace
}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&syncbn::cuda::batch_norm_stats));
}
