// Single-process operators: the operators of a group, joined without an all-reduce between them.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "operators.h"

namespace syncbn {

// Calls `function`, one of the joined operators. Errors name `op` in its place.
template <typename Function, typename... Args>
auto call_as(const char* op, Function* function, Args&&... args) {
  try {
    return function(std::forward<Args>(args)...);
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    const size_t colon = message.find(": ");
    if (message.rfind("syncbn::", 0) != 0 || colon == std::string::npos) {
      throw;
    }
    throw std::runtime_error(op + message.substr(colon));
  }
}

template <StatsFunction kStats, ApplyFunction kApply, BackwardReduceFunction kReduce,
          BackwardApplyFunction kBackwardApply>
struct SingleProcess {
  static std::tuple<Tensor, Tensor, Tensor, Tensor> forward(
      const Tensor& input, std::optional<Tensor> weight, std::optional<Tensor> bias,
      std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
      std::optional<Tensor> num_batches_tracked, std::optional<double> momentum, double eps,
      std::optional<Tensor> residual, int64_t activation, double negative_slope,
      std::optional<Tensor> constants, std::optional<Tensor> mask) {
    constexpr const char* kOp = "syncbn::batch_norm_forward";
    const Tensor totals =
        call_as(kOp, kStats, input, /*fingerprint=*/std::nullopt, /*next_size=*/0, mask);
    return call_as(kOp, kApply, input, totals, std::move(weight), std::move(bias),
                   std::move(running_mean), std::move(running_var), std::move(num_batches_tracked),
                   momentum, eps, /*fingerprint_sum=*/std::nullopt, /*status=*/std::nullopt,
                   std::move(residual), activation, negative_slope, std::move(constants),
                   std::move(mask));
  }

  static std::tuple<Tensor, Tensor, Tensor> backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
      std::optional<Tensor> weight, const Tensor& count, ScalarType weight_dtype,
      ScalarType bias_dtype, std::optional<Tensor> constants, int64_t activation,
      double negative_slope, std::optional<Tensor> mask) {
    constexpr const char* kOp = "syncbn::batch_norm_backward";
    auto [sums, grad_weight, grad_bias] = call_as(
        kOp, kReduce, grad_output, input, mean, invstd, weight_dtype, bias_dtype,
        /*fingerprint=*/std::nullopt, /*next_size=*/0, constants, activation, negative_slope, mask);
    Tensor grad_input =
        call_as(kOp, kBackwardApply, grad_output, input, mean, invstd, std::move(weight), sums,
                count, /*fingerprint_sum=*/std::nullopt, /*status=*/std::nullopt,
                std::move(constants), activation, negative_slope, std::move(mask));
    return {grad_input, grad_weight, grad_bias};
  }
};

}  // namespace syncbn
