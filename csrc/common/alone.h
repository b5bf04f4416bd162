// The passes of a process that is alone: what its group's operators do, joined without a message
// between processes.
#pragma once

#include <utility>

#include "operators.h"

namespace syncbn {

template <StatsFunction kStats, ApplyFunction kApply, BackwardReduceFunction kReduce,
          BackwardApplyFunction kBackwardApply>
struct Alone {
  static std::tuple<Tensor, Tensor, Tensor, Tensor> forward(
      const Tensor& input, std::optional<Tensor> weight, std::optional<Tensor> bias,
      std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
      std::optional<Tensor> num_batches_tracked, std::optional<double> momentum, double eps,
      std::optional<Tensor> residual, int64_t activation, double negative_slope,
      std::optional<Tensor> constants, std::optional<Tensor> mask) {
    const Tensor totals = kStats(input, /*tag=*/{}, /*outlook=*/0, mask);
    return kApply(input, totals, std::move(weight), std::move(bias), std::move(running_mean),
                  std::move(running_var), std::move(num_batches_tracked), momentum, eps,
                  /*tag_sum=*/{}, /*verdict=*/{}, std::move(residual), activation, negative_slope,
                  std::move(constants), std::move(mask));
  }

  static std::tuple<Tensor, Tensor, Tensor> backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
      std::optional<Tensor> weight, const Tensor& count, ScalarType weight_dtype,
      ScalarType bias_dtype, std::optional<Tensor> constants, int64_t activation,
      double negative_slope, std::optional<Tensor> mask) {
    auto [sums, grad_weight, grad_bias] =
        kReduce(grad_output, input, mean, invstd, weight_dtype, bias_dtype, /*tag=*/{},
                /*outlook=*/0, constants, activation, negative_slope, mask);
    Tensor grad_input = kBackwardApply(grad_output, input, mean, invstd, std::move(weight), sums,
                                       count, /*tag_sum=*/{}, /*verdict=*/{}, std::move(constants),
                                       activation, negative_slope, std::move(mask));
    return {grad_input, grad_weight, grad_bias};
  }
};

}  // namespace syncbn
