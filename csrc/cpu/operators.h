// The operators as functions, for alone.cpp, which joins them.
#pragma once

#include <optional>
#include <tuple>

#include "../common/stable.h"

namespace syncbn::cpu {

Tensor batch_norm_stats(const Tensor& input, std::optional<double> tag, double outlook);

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_apply(
    const Tensor& input, const Tensor& totals, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> running_mean,
    std::optional<Tensor> running_var, std::optional<Tensor> num_batches_tracked,
    std::optional<double> momentum, double eps, std::optional<double> tag_sum,
    std::optional<Tensor> verdict, std::optional<Tensor> residual, int64_t activation,
    double negative_slope, std::optional<Tensor> constants);

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    ScalarType weight_dtype, ScalarType bias_dtype, std::optional<double> tag, double outlook,
    std::optional<Tensor> constants, int64_t activation, double negative_slope);

Tensor batch_norm_backward_apply(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, std::optional<Tensor> weight,
                                 const Tensor& sums, const Tensor& count,
                                 std::optional<double> tag_sum, std::optional<Tensor> verdict,
                                 std::optional<Tensor> constants, int64_t activation,
                                 double negative_slope);

}  // namespace syncbn::cpu
