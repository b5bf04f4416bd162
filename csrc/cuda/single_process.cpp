// batch_norm_forward and batch_norm_backward for CUDA tensors.

#include "../common/single_process.h"

namespace syncbn::cuda {
namespace {

using SingleProcess = syncbn::SingleProcess<batch_norm_stats, batch_norm_apply,
                                            batch_norm_backward_reduce, batch_norm_backward_apply>;

}  // namespace
}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_forward", TORCH_BOX(&syncbn::cuda::SingleProcess::forward));
  m.impl("batch_norm_backward", TORCH_BOX(&syncbn::cuda::SingleProcess::backward));
}
