// batch_norm_backward_apply on CUDA. Reads dy and x and writes dx once.

#include "../../common/channel_constants.h"
#include "channel_vector.h"
#include "elementwise.h"
#include "operators.h"

namespace syncbn::cuda {
namespace {

struct GradInput {
  static constexpr int kInputs = 2;
  static constexpr int kConstants = 4;  // center, slope, shift, scale

  template <typename A>
  static __device__ __forceinline__ A apply(const A (&in)[2], const A (&constants)[4]) {
    return in[0] * constants[3] + ((in[1] - constants[0]) * constants[1] + constants[2]);
  }
};

struct PrepareGradInput {
  const double* mean;
  const double* invstd;
  ChannelVector weight;
  const double* sums;
  const double* count;
  int64_t channels;

  template <typename A>
  __device__ Constants<4> constants(int64_t channel, bool) const {
    const syncbn::GradInput<double> result =
        grad_input_constants(mean[channel], static_cast<A>(mean[channel]), invstd[channel],
                             load_channel(weight, channel, 1), sums[channel],
                             sums[channels + channel], *count < 1 ? 1 : *count);
    return {{result.center, result.slope, result.shift, result.scale}};
  }
};

}  // namespace

void launch_batch_norm_backward_apply(const Plan& plan, void* stream, const void* grad_output,
                                      const void* input, const double* mean, const double* invstd,
                                      ChannelVector weight, const double* sums, const double* count,
                                      void* grad_input) {
  launch_elementwise<GradInput>(
      plan, stream, {grad_output, input}, grad_input,
      PrepareGradInput{mean, invstd, weight, sums, count, plan.geometry.channels});
}

}  // namespace syncbn::cuda
