// batch_norm_apply on CUDA. Reads the input and writes the output once.
//
// The first block of each tile of channels also writes mean and invstd and moves the running
// statistics.

#include "../../common/formulas.h"
#include "../../common/message.h"
#include "../../common/running.h"
#include "channel_vector.h"
#include "elementwise.h"
#include "operators.h"

namespace syncbn::cuda {
namespace {

struct PrepareNormalize {
  const double* totals;
  Judge judge;
  int64_t channels;
  ChannelVector weight;
  ChannelVector bias;
  RunningStatistics running;
  double eps;
  double* mean;
  double* invstd;
  double* count;

  template <typename A>
  __device__ Normalize<double> formula(int64_t channel, bool first) const {
    const Verdict verdict = read_verdict(totals, channels, judge.expectation);
    const double group_count = verdict == Verdict::kSound ? totals[2 * channels] : NAN;
    const Moments<double> batch =
        from_sums({totals[channel], totals[channels + channel]}, group_count);
    const double inverse = 1 / sqrt(batch.variance() + eps);
    if (first) {
      mean[channel] = batch.mean;
      invstd[channel] = inverse;
      if (channel == 0) {
        *count = batch.count;
        judge.write(verdict);
      }
      if (batch.count > 0) {  // neither an empty group nor a pass that is not sound
        move_running(channel, batch);
      }
    }
    return normalize_constants(batch.mean, static_cast<A>(batch.mean), inverse,
                               load_channel(weight, channel, 1), load_channel(bias, channel, 0));
  }

  __device__ void move_running(int64_t channel, const Moments<double>& batch) const {
    // A cumulative average needs the new counter in all blocks: another kernel has counted.
    double factor = running.momentum;
    if (running.cumulative) {
      factor = 1 / static_cast<double>(*running.num_batches_tracked);
    } else if (channel == 0 && running.num_batches_tracked != nullptr) {
      *running.num_batches_tracked += 1;
    }
    if (running.mean.data == nullptr) {
      return;
    }
    double new_mean = load_channel(running.mean, channel, 0);
    double new_var = load_channel(running.var, channel, 0);
    update_running(new_mean, new_var, batch, factor, largest_finite(running.mean.dtype),
                   largest_finite(running.var.dtype));
    store_channel(running.mean, channel, new_mean);
    store_channel(running.var, channel, new_var);
  }
};

__global__ void count_batch_kernel(const double* totals, int64_t channels, Expectation expectation,
                                   int64_t* num_batches_tracked) {
  const bool sound = read_verdict(totals, channels, expectation) == Verdict::kSound;
  if (sound && totals[2 * channels] > 0) {
    *num_batches_tracked += 1;
  }
}

}  // namespace

void launch_batch_norm_apply(const Plan& plan, void* stream, const void* input,
                             const double* totals, Judge judge, ChannelVector weight,
                             ChannelVector bias, RunningStatistics running, double eps,
                             void* output, double* mean, double* invstd, double* count) {
  const int64_t channels = plan.geometry.channels;
  if (running.cumulative) {
    launch(count_batch_kernel, dim3(1), dim3(1), 0, static_cast<cudaStream_t>(stream), totals,
           channels, judge.expectation, running.num_batches_tracked);
  }
  launch_elementwise<Normalize>(
      plan, stream, {input}, output,
      PrepareNormalize{totals, judge, channels, weight, bias, running, eps, mean, invstd, count});
}

}  // namespace syncbn::cuda
