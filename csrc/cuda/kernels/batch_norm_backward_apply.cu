// batch_norm_backward_apply on CUDA. Reads dy and x and writes dx once.

#include "affine.h"
#include "channel_vector.h"
#include "operators.h"

namespace syncbn::cuda {
namespace {

// (dy - sum(dy) / count - (x - mean) * slope) * scale, with
// slope = invstd * sum(dy * xhat) / count, scale = weight * invstd.
// x - center is subtracted, with the float next to the mean; what that leaves of the mean times the
// slope is part of the offset, -sum(dy) / count.
struct GradInput {
  static constexpr int kInputs = 2;
  static constexpr int kConstants = 4;  // center, slope, offset, scale

  template <typename A>
  static __device__ __forceinline__ A apply(const A (&in)[2], const A (&constants)[4]) {
    return ((in[0] + constants[2]) - (in[1] - constants[0]) * constants[1]) * constants[3];
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
    // A group without values has no gradient to normalise; its sums are zero.
    const double n = *count < 1 ? 1 : *count;
    const double center = static_cast<A>(mean[channel]);
    const double slope = invstd[channel] * sums[channels + channel] / n;
    const double offset = (mean[channel] - center) * slope - sums[channel] / n;
    return {{center, slope, offset, load_channel(weight, channel, 1) * invstd[channel]}};
  }
};

}  // namespace

void launch_batch_norm_backward_apply(const Plan& plan, void* stream, const void* grad_output,
                                      const void* input, const double* mean, const double* invstd,
                                      ChannelVector weight, const double* sums, const double* count,
                                      void* grad_input) {
  launch_affine<GradInput>(
      plan, stream, {grad_output, input}, grad_input,
      PrepareGradInput{mean, invstd, weight, sums, count, plan.geometry.channels});
}

}  // namespace syncbn::cuda
