// batch_norm_forward and batch_norm_backward on the CPU.

#include "../common/single_process.h"

namespace syncbn::cpu {
namespace {

using SingleProcess = syncbn::SingleProcess<batch_norm_stats, batch_norm_apply,
                                            batch_norm_backward_reduce, batch_norm_backward_apply>;

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_forward", TORCH_BOX(&syncbn::cpu::SingleProcess::forward));
  m.impl("batch_norm_backward", TORCH_BOX(&syncbn::cpu::SingleProcess::backward));
}
