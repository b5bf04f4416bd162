// The CUDA operators as host functions: what adapters (and tests without a GPU) call.
//
// Each checks nothing, allocates nothing, launches on the given stream and returns at once. The
// contracts are those of csrc/ops.cpp. Includes neither torch nor CUDA.
#pragma once

#include <cstdint>

#include "../../common/activations.h"
#include "../../common/message.h"
#include "plan.h"

namespace syncbn::cuda {

// One value per channel in memory: a weight, a bias or a running statistic. No data: none is given.
struct ChannelVector {
  void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::kFloat;
};

struct RunningStatistics {
  ChannelVector mean;
  ChannelVector var;
  int64_t* num_batches_tracked = nullptr;  // may be missing, unless the average is cumulative
  bool cumulative = false;                 // a momentum of None
  double momentum = 0;
};

// The memory in which the blocks of a split reduction meet.
struct Workspace {
  double* partials;    // plan.num_partials() values
  unsigned* counters;  // plan.num_counters() zeros, which it leaves as zeros
};

// What sums over all ranks are judged by, and where a status that is not sound is written, if
// anywhere.
struct Verifier {
  Expectation expectation;
  double* status = nullptr;

  // The first status stays until the host has read it.
  SYNCBN_HOST_DEVICE void write(Status found) const {
    if (found != Status::kConsistent && status != nullptr && *status == 0) {
      *status =
          found == Status::kAborted ? -expectation.fingerprint_sum : expectation.fingerprint_sum;
    }
  }
};

// What follows the normalization; null where there is nothing. Tensors have the input's geometry
// and dtype.
struct Following {
  ActivationChoice activation;
  const void* residual = nullptr;
  double* constants = nullptr;  // [2C]: scale and shift, which are written
};

// What the gradient through an activation is computed from: the same constants, and the residual or
// the output where a residual was added. Its gradient is written then.
struct Through {
  ActivationChoice activation;
  const double* constants = nullptr;
  const void* residual = nullptr;
  const void* output = nullptr;
  void* dz = nullptr;
};

void launch_batch_norm_stats(const Plan& plan, void* stream, const void* input, double* message,
                             Tail tail, Workspace workspace);

// One launch, and one more before it for a cumulative average.
void launch_batch_norm_apply(const Plan& plan, void* stream, const void* input,
                             const double* totals, Verifier verifier, ChannelVector weight,
                             ChannelVector bias, RunningStatistics running, double eps,
                             void* output, double* mean, double* invstd, double* count,
                             Following following = {});

void launch_batch_norm_backward_reduce(const Plan& plan, void* stream, const void* grad_output,
                                       const void* input, const double* mean, const double* invstd,
                                       double* sums, Tail tail, ChannelVector grad_weight,
                                       ChannelVector grad_bias, Workspace workspace,
                                       Through through = {});

void launch_batch_norm_backward_apply(const Plan& plan, void* stream, const void* grad_output,
                                      const void* input, const double* mean, const double* invstd,
                                      ChannelVector weight, const double* sums, Verifier verifier,
                                      const double* count, void* grad_input, Through through = {});

}  // namespace syncbn::cuda
