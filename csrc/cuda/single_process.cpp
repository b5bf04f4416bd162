// batch_norm_forward and batch_norm_backward for CUDA tensors.

#include "../common/operators.h"

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  using namespace syncbn;
  m.impl(
      "batch_norm_forward",
      &boxed<read_forward, single_process_forward<cuda::batch_norm_stats, cuda::batch_norm_apply>>);
  m.impl("batch_norm_backward",
         &boxed<read_backward, single_process_backward<cuda::batch_norm_backward_reduce,
                                                       cuda::batch_norm_backward_apply>>);
}
