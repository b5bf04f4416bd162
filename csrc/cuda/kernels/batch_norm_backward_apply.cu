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

  struct Operands {
    double mean;
    double invstd;
    uint64_t weight;
    double sum_dy;
    double sum_dy_xhat;
    double count;
    double withdrawn;  // NaN if a rank has
    double tag_sum;
  };

  __device__ Operands load(int64_t channel, bool) const {
    Operands operands{};
    operands.mean = mean[channel];
    operands.invstd = invstd[channel];
    operands.weight = load_bits(weight, channel);
    operands.sum_dy = sums[channel];
    operands.sum_dy_xhat = sums[channels + channel];
    operands.count = *count;
    if (judge.expectation.present) {
      operands.withdrawn = sums[2 * channels];
      operands.tag_sum = sums[2 * channels + 1];
    }
    return operands;
  }

  using Derived = Verdict;

  __device__ Verdict derive(const Operands& operands) const {
    return judge_sums(operands.withdrawn, operands.tag_sum, judge.expectation);
  }

  template <typename A>
  __device__ GradInput<double> formula(const Operands& operands, Verdict verdict) const {
    double group_count = operands.count < 1 ? 1 : operands.count;
    if (verdict != Verdict::kSound) {
      group_count = NAN;
    }
    return grad_input_constants(operands.mean, static_cast<A>(operands.mean), operands.invstd,
                                decode(weight, operands.weight, 1), operands.sum_dy,
                                operands.sum_dy_xhat, group_count);
  }

  __device__ void finish(const Operands&, Verdict verdict, int64_t channel) const {
    if (channel == 0) {
      judge.write(verdict);
    }
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
