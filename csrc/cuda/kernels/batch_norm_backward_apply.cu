// batch_norm_backward_apply on CUDA: reads dy and x and writes dx, each once.

#include "../../common/formulas.h"
#include "channel_vector.h"
#include "elementwise.h"
#include "launchers.h"

namespace syncbn::cuda {
namespace {

template <bool kWithActivation>
struct PrepareGradInput {
  const double* mean;
  const double* invstd;
  ChannelVector weight;
  const double* sums;
  Verifier verifier;
  const double* count;
  int64_t channels;
  const double* constants;

  struct Operands {
    double mean;
    double invstd;
    uint64_t weight;
    double sum_dy;
    double sum_dy_xhat;
    double count;
    double aborted;  // NaN if a rank has
    double tail_sum;
    double forward_shift;
  };

  __device__ Operands load(int64_t channel, bool) const {
    Operands operands{};
    operands.mean = mean[channel];
    operands.invstd = invstd[channel];
    operands.weight = load_bits(weight, channel);
    operands.sum_dy = sums[channel];
    operands.sum_dy_xhat = sums[channels + channel];
    operands.count = *count;
    if (verifier.expectation.present) {
      operands.aborted = sums[2 * channels];
      operands.tail_sum = sums[2 * channels + 1];
    }
    if (kWithActivation) {
      operands.forward_shift = constants[channels + channel];
    }
    return operands;
  }

  using Derived = Status;

  __device__ Status derive(const Operands& operands) const {
    return verify_sums(operands.aborted, operands.tail_sum, verifier.expectation);
  }

  template <typename A>
  __device__ auto formula(const Operands& operands, Status status) const {
    double group_count = operands.count < 1 ? 1 : operands.count;
    if (status != Status::kConsistent) {
      group_count = NAN;
    }
    const GradInput<double> grad_input = grad_input_constants(
        operands.mean, static_cast<A>(operands.mean), operands.invstd,
        decode(weight, operands.weight, 1), operands.sum_dy, operands.sum_dy_xhat, group_count);
    if constexpr (kWithActivation) {
      return GradInputWithEpilogue<NoActivation>::Formula<double>{
          grad_input, operands.forward_shift, {}};
    } else {
      return grad_input;
    }
  }

  template <typename A>
  __device__ void finish(const Operands&, Status status, int64_t channel) const {
    if (channel == 0) {
      verifier.write(status);
    }
  }
};

}  // namespace

void launch_batch_norm_backward_apply(const Plan& plan, void* stream, const void* grad_output,
                                      const void* input, const double* mean, const double* invstd,
                                      ChannelVector weight, const double* sums, Verifier verifier,
                                      const double* count, void* grad_input,
                                      EpilogueGradient epilogue) {
  const int64_t channels = plan.geometry.channels;
  if (epilogue.activation.kind == Activation::kNone) {
    launch_elementwise(
        plan, stream, {grad_output, input}, grad_input,
        PrepareGradInput<false>{mean, invstd, weight, sums, verifier, count, channels, nullptr},
        [](auto type, const auto& function) {
          function(GradInput<compute_t<typename decltype(type)::type>>{});
        });
    return;
  }
  launch_elementwise(
      plan, stream, {grad_output, input}, grad_input,
      PrepareGradInput<true>{mean, invstd, weight, sums, verifier, count, channels,
                             epilogue.constants},
      [&](auto type, const auto& function) {
        using T = typename decltype(type)::type;
        dispatch_activation<T>(epilogue.activation, plan.dtype, [&](auto activation) {
          using EpilogueGradient = GradInputWithEpilogue<decltype(activation)>;
          function(typename EpilogueGradient::template Formula<compute_t<T>>{{}, {}, activation});
        });
      });
}

}  // namespace syncbn::cuda
