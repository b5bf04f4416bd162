// batch_norm_forward and batch_norm_backward for CUDA tensors.

#include "../common/alone.h"

#include "operators.h"

namespace syncbn::cuda {
namespace {

using Alone = syncbn::Alone<batch_norm_stats, batch_norm_apply, batch_norm_backward_reduce,
                            batch_norm_backward_apply>;

}  // namespace
}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("batch_norm_forward", TORCH_BOX(&syncbn::cuda::Alone::forward));
  m.impl("batch_norm_backward", TORCH_BOX(&syncbn::cuda::Alone::backward));
}
