// batch_norm_backward_apply on CUDA. Reads dy and x and writes dx once.

#include "../../common/formulas.h"
#include "channel_vector.h"
#include "elementwise.h"
#include "operators.h"

namespace syncbn::cuda {
namespace {

struct PrepareGradInput {
  const double* mean;
  const double* invstd;
  ChannelVector weight;
  const double* sums;
  Judge judge;
  const double* count;
  int64_t channels;

  template <typename A>
  __device__ GradInput<double> formula(int64_t channel, bool first) const {
    double group_count = *count < 1 ? 1 : *count;
    if (judge.expectation.present) {
      const Verdict verdict = read_verdict(sums, channels, judge.expectation);
      if (verdict != Verdict::kSound) {
        group_count = NAN;
      }
      if (first && channel == 0) {
        judge.write(verdict);
      }
    }
    return grad_input_constants(mean[channel], static_cast<A>(mean[channel]), invstd[channel],
                                load_channel(weight, channel, 1), sums[channel],
                                sums[channels + channel], group_count);
  }
};

}  // namespace

void launch_batch_norm_backward_apply(const Plan& plan, void* stream, const void* grad_output,
                                      const void* input, const double* mean, const double* invstd,
                                      ChannelVector weight, const double* sums, Judge judge,
                                      const double* count, void* grad_input) {
  launch_elementwise<GradInput>(
      plan, stream, {grad_output, input}, grad_input,
      PrepareGradInput{mean, invstd, weight, sums, judge, count, plan.geometry.channels});
}

}  // namespace syncbn::cuda
