// The launchers of the CUDA kernels: host functions that adapters and the emulation's tests call.
//
// A launcher checks nothing, allocates nothing, launches on the given stream and returns at once.
// csrc/ops.cpp has the contracts.
#pragma once

#include <cstdint>

#include "../../common/activations.h"
#include "../../common/message.h"
#include "plan.h"

namespace syncbn::cuda {

// A weight, a bias or a running statistic; without data, none.
struct ChannelVector {
  void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::kFloat;
};

struct RunningStatistics {
  ChannelVector mean;
  ChannelVector var;
  int64_t* num_batches_tracked = nullptr;  // required for a cumulative average
  int64_t* num_batches_before = nullptr;   // memory for a copy of it, for a cumulative average
  bool cumulative = false;                 // a momentum of None
  double momentum = 0;
};

// The memory in which the blocks of a split reduction exchange partial sums.
struct Workspace {
  double* partials;    // plan.num_partials() values
  unsigned* counters;  // plan.num_counters() zeros; zeros again after the launch
};

// Verifies sums over all ranks and writes an inconsistent status, if there is memory for it.
struct Verifier {
  Expectation expectation;
  double* status = nullptr;

  // The first status stays until the host has read it.
  SYNCBN_HOST_DEVICE void write(Status found) const {
    if (found != Status::kConsistent && status != nullptr && *status == 0) {
      *status = found == Status::kAborted ? -expectation.tail_sum : expectation.tail_sum;
    }
  }
};

// The operations after the normalization. The residual has the input's geometry and dtype.
struct Epilogue {
  ActivationChoice activation;
  const void* residual = nullptr;
  double* constants = nullptr;  // [2C]: scale and shift, an output
};

// The sources of an activation's gradient: the same constants and, if a residual was added, the
// residual or the output; then dz, the residual's gradient, is written.
struct EpilogueGradient {
  ActivationChoice activation;
  const double* constants = nullptr;
  const void* residual = nullptr;
  const void* output = nullptr;
  void* dz = nullptr;
};

void launch_batch_norm_stats(const Plan& plan, void* stream, const void* input, double* message,
                             Tail tail, Workspace workspace);

// For a cumulative average another kernel goes before. All that is kept is updated by the last one:
// if it cannot be launched, nothing has changed.
void launch_batch_norm_apply(const Plan& plan, void* stream, const void* input,
                             const double* totals, Verifier verifier, ChannelVector weight,
                             ChannelVector bias, RunningStatistics running, double eps,
                             void* output, double* mean, double* invstd, double* count,
                             Epilogue epilogue = {});

void launch_batch_norm_backward_reduce(const Plan& plan, void* stream, const void* grad_output,
                                       const void* input, const double* mean, const double* invstd,
                                       double* sums, Tail tail, ChannelVector grad_weight,
                                       ChannelVector grad_bias, Workspace workspace,
                                       EpilogueGradient epilogue = {});

void launch_batch_norm_backward_apply(const Plan& plan, void* stream, const void* grad_output,
                                      const void* input, const double* mean, const double* invstd,
                                      ChannelVector weight, const double* sums, Verifier verifier,
                                      const double* count, void* grad_input,
                                      EpilogueGradient epilogue = {});

// `size` is the number of values without the tail; `other` is a second sum of tails that may be.
void launch_verify_sums(void* stream, const double* sums, int64_t size, Verifier verifier,
                        Expectation other, double* verified);

}  // namespace syncbn::cuda
