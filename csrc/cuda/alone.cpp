// batch_norm_forward and batch_norm_backward for CUDA tensors.

#include "../common/alone.h"

#include "operators.h"

namespace syncbn::cuda {
namespace {

struct Operators {
  static constexpr auto kStats = batch_norm_stats;
  static constexpr auto kApply = batch_norm_apply;
  static constexpr auto kReduce = batch_norm_backward_reduce;
  static constexpr auto kBackwardApply = batch_norm_backward_apply;
};

}  // namespace
}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  using Alone = syncbn::Alone<syncbn::cuda::Operators>;
  m.impl("batch_norm_forward", TORCH_BOX(&Alone::forward));
  m.impl("batch_norm_backward", TORCH_BOX(&Alone::backward));
}
