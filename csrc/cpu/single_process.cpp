// batch_norm_forward and batch_norm_backward on the CPU.

#include "../common/operators.h"

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using namespace syncbn;
  m.impl(
      "batch_norm_forward",
      &boxed<read_forward, single_process_forward<cpu::batch_norm_stats, cpu::batch_norm_apply>>);
  m.impl("batch_norm_backward",
         &boxed<read_backward, single_process_backward<cpu::batch_norm_backward_reduce,
                                                       cpu::batch_norm_backward_apply>>);
}
