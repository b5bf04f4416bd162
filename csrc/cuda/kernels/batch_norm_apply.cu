// batch_norm_apply on CUDA: reads input and residual and writes the output, each once. The first
// block of each tile of channels also writes the statistics and updates the running statistics.

#include "../../common/formulas.h"
#include "../../common/message.h"
#include "../../common/running.h"
#include "channel_vector.h"
#include "elementwise.h"
#include "launchers.h"

namespace syncbn::cuda {
namespace {

struct PrepareNormalize {
  const double* totals;
  Verifier verifier;
  int64_t channels;
  ChannelVector weight;
  ChannelVector bias;
  RunningStatistics running;
  double eps;
  double* mean;
  double* invstd;
  double* count;
  double* constants;

  struct Operands {
    Sums sums;
    double count;
    double tail_sum;
    uint64_t weight;
    uint64_t bias;
    uint64_t running_mean;
    uint64_t running_var;
    int64_t num_batches_tracked;
  };

  __device__ Operands load(int64_t channel, bool first) const {
    Operands operands{};
    operands.sums = {totals[channel], totals[channels + channel]};
    operands.count = totals[2 * channels];
    operands.tail_sum = verifier.expectation.present ? totals[2 * channels + 1] : 0;
    operands.weight = load_bits(weight, channel);
    operands.bias = load_bits(bias, channel);
    if (first) {
      operands.running_mean = load_bits(running.mean, channel);
      operands.running_var = load_bits(running.var, channel);
      if (running.cumulative) {
        operands.num_batches_tracked = *running.num_batches_before;
      } else if (channel == 0 && running.num_batches_tracked != nullptr) {
        operands.num_batches_tracked = *running.num_batches_tracked;
      }
    }
    return operands;
  }

  struct Derived {
    Status status;
    Moments<double> batch;
    double invstd;
  };

  __device__ Derived derive(const Operands& operands) const {
    Derived derived;
    derived.status = verify_sums(operands.count, operands.tail_sum, verifier.expectation);
    const bool consistent = derived.status == Status::kConsistent;
    derived.batch = from_sums(operands.sums, consistent ? operands.count : NAN);
    derived.invstd = 1 / sqrt(derived.batch.variance() + eps);
    return derived;
  }

  template <typename A>
  __device__ Normalize<double> formula(const Operands& operands, const Derived& derived) const {
    const double center = static_cast<A>(derived.batch.mean);
    return normalize_constants(derived.batch.mean, center, derived.invstd,
                               decode(weight, operands.weight, 1), decode(bias, operands.bias, 0));
  }

  template <typename A>
  __device__ void finish(const Operands& operands, const Derived& derived, int64_t channel) const {
    const Moments<double>& batch = derived.batch;
    mean[channel] = batch.mean;
    invstd[channel] = derived.invstd;
    if (constants != nullptr) {
      const Normalize<double> normalize = formula<A>(operands, derived);
      constants[channel] = normalize.scale;
      constants[channels + channel] = normalize.shift;
    }
    if (channel == 0) {
      *count = batch.count;
      verifier.write(derived.status);
    }
    if (batch.count > 0) {  // false for an empty group (0) and for an inconsistent pass (NaN)
      move_running(operands, channel, batch);
    }
  }

 private:
  __device__ void move_running(const Operands& operands, int64_t channel,
                               const Moments<double>& batch) const {
    double factor = running.momentum;
    if (running.cumulative) {
      factor = 1 / static_cast<double>(operands.num_batches_tracked + 1);
    }
    if (channel == 0 && running.num_batches_tracked != nullptr) {
      *running.num_batches_tracked = operands.num_batches_tracked + 1;
    }
    if (running.mean.data == nullptr) {
      return;
    }
    double new_mean = decode(running.mean, operands.running_mean, 0);
    double new_var = decode(running.var, operands.running_var, 0);
    update_running(new_mean, new_var, batch, factor, running.cumulative,
                   largest_finite(running.mean.dtype), largest_finite(running.var.dtype));
    store_channel(running.mean, channel, new_mean);
    store_channel(running.var, channel, new_var);
  }
};

template <bool kWithResidual>
struct WithNormalize {
  ActivationChoice choice;
  DType dtype;

  template <typename T, typename Function>
  void operator()(TypeTag<T>, const Function& function) const {
    dispatch_activation<T>(choice, dtype, [&](auto activation) {
      using Then = NormalizeWithEpilogue<decltype(activation), kWithResidual>;
      function(typename Then::template Formula<compute_t<T>>{{}, {}, {}, activation});
    });
  }
};

// Every block of a cumulative average reads the old number of batches; one writes the new number.
__global__ void copy_number_kernel(const int64_t* from, int64_t* to) { *to = *from; }

}  // namespace

void launch_batch_norm_apply(const Plan& plan, void* stream, const void* input,
                             const double* totals, Verifier verifier, ChannelVector weight,
                             ChannelVector bias, RunningStatistics running, double eps,
                             void* output, double* mean, double* invstd, double* count,
                             Epilogue epilogue) {
  const int64_t channels = plan.geometry.channels;
  if (running.cumulative) {
    launch(copy_number_kernel, dim3(1), dim3(1), 0, static_cast<cudaStream_t>(stream),
           running.num_batches_tracked, running.num_batches_before);
  }
  const PrepareNormalize prepare{
      totals, verifier, channels,          weight, bias, running, eps, mean,
      invstd, count,    epilogue.constants};
  if (epilogue.activation.kind == Activation::kNone && epilogue.residual == nullptr) {
    launch_elementwise(plan, stream, {input}, output, prepare, [](auto type, const auto& function) {
      function(Normalize<compute_t<typename decltype(type)::type>>{});
    });
  } else if (epilogue.residual != nullptr) {
    launch_elementwise(plan, stream, {input, epilogue.residual}, output, prepare,
                       WithNormalize<true>{epilogue.activation, plan.dtype});
  } else {
    launch_elementwise(plan, stream, {input}, output, prepare,
                       WithNormalize<false>{epilogue.activation, plan.dtype});
  }
}

}  // namespace syncbn::cuda
