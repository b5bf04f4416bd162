// batch_norm_stats for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_stats.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {

Tensor batch_norm_stats(const Tensor& input, std::optional<double> fingerprint, double next_size,
                        std::optional<Tensor> mask) {
  constexpr const char* kOp = "syncbn::batch_norm_stats";
  const Device device(kOp, input);
  check_no_mask(kOp, mask);
  const Geometry geometry = check_input(kOp, "input", input);
  const int64_t channels = geometry.channels;
  const Tail tail = to_tail(fingerprint, next_size);
  const int64_t size = tail.present ? size_with_tail(channels) : 2 * channels + 1;
  Tensor message = allocate_vector(size, ScalarType::Double, input);
  const void* x = input.const_data_ptr();
  const Plan plan =
      make_plan(geometry, to_dtype(input.scalar_type()), {x}, device.multiprocessors());
  std::vector<Tensor> keep_alive;
  launch_batch_norm_stats(plan, device.stream(), x,
                          static_cast<double*>(message.mutable_data_ptr()), tail,
                          device.make_workspace(plan, input, keep_alive));
  return message;
}

}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&syncbn::cuda::batch_norm_stats));
}
