// batch_norm_forward and batch_norm_backward on the CPU.

#include "../common/alone.h"

#include "operators.h"

namespace syncbn::cpu {
namespace {

struct Operators {
  static constexpr auto kStats = batch_norm_stats;
  static constexpr auto kApply = batch_norm_apply;
  static constexpr auto kReduce = batch_norm_backward_reduce;
  static constexpr auto kBackwardApply = batch_norm_backward_apply;
};

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  using Alone = syncbn::Alone<syncbn::cpu::Operators>;
  m.impl("batch_norm_forward", TORCH_BOX(&Alone::forward));
  m.impl("batch_norm_backward", TORCH_BOX(&Alone::backward));
}
