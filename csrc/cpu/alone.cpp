// batch_norm_forward and batch_norm_backward on the CPU.

#include "../common/alone.h"

#include "operators.h"

namespace syncbn::cpu {
namespace {

using Alone = syncbn::Alone<batch_norm_stats, batch_norm_apply, batch_norm_backward_reduce,
                            batch_norm_backward_apply>;

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_forward", TORCH_BOX(&syncbn::cpu::Alone::forward));
  m.impl("batch_norm_backward", TORCH_BOX(&syncbn::cpu::Alone::backward));
}
