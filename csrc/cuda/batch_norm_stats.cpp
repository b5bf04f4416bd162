#include "adapter.h"

namespace syncbn::cuda {
namespace {

Tensor batch_norm_stats(const Tensor& input) {
  const Device device(input);
  const Geometry geometry = check_input("syncbn::batch_norm_stats", "input", input);
  Tensor message = torch::stable::new_empty(input, {2 * geometry.channels + 1}, ScalarType::Double);
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
