// batch_norm_stats for CUDA tensors: checks as csrc/cpu does, allocates, launches
// kernels/batch_norm_stats.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {

StatsResults batch_norm_stats(const ForwardArguments& a) {
  check_arguments(a);
  check_no_mask(a.mask);
  const Tensor& input = a.input;
  const Device device(input);
  const Geometry geometry = check_layout("input", input);
  const int64_t channels = geometry.channels;
  const Tail tail = read_tail(a.tail);
  const int64_t size = tail.present ? size_with_tail(channels) : 2 * channels + 1;
  Tensor message = allocate_vector(size, ScalarType::Double, input);
  const void* x = input.const_data_ptr();
  const Plan plan =
      make_plan(kReduction, geometry, to_dtype(input.scalar_type()), {x}, device.multiprocessors());
  std::vector<Tensor> keep_alive;
  launch_batch_norm_stats(plan, device.stream(), x,
                          static_cast<double*>(message.mutable_data_ptr()), tail,
                          device.make_workspace(plan, input, keep_alive));
  return {message};
}

}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_stats", &syncbn::boxed<syncbn::read_stats, syncbn::cuda::batch_norm_stats>);
}
