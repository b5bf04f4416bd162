// The operators as functions of the CPU and of the CUDA library. csrc/ops.cpp describes them.
#pragma once

#include <optional>
#include <tuple>

#include "stable.h"

namespace syncbn {

using StatsFunction = Tensor(const Tensor& input, std::optional<double> fingerprint,
                             double next_size, std::optional<Tensor> mask);

using ApplyFunction = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor& input, const Tensor& totals, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> running_mean,
    std::optional<Tensor> running_var, std::optional<Tensor> num_batches_tracked,
    std::optional<double> momentum, double eps, std::optional<double> fingerprint_sum,
    std::optional<Tensor> status, std::optional<Tensor> residual, int64_t activation,
    double negative_slope, std::optional<Tensor> constants, std::optional<Tensor> mask);

using BackwardReduceFunction = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    ScalarType weight_dtype, ScalarType bias_dtype, std::optional<double> fingerprint,
    double next_size, std::optional<Tensor> constants, int64_t activation, double negative_slope,
    std::optional<Tensor> mask);

using BackwardApplyFunction = Tensor(const Tensor& grad_output, const Tensor& input,
                                     const Tensor& mean, const Tensor& invstd,
                                     std::optional<Tensor> weight, const Tensor& sums,
                                     const Tensor& count, std::optional<double> fingerprint_sum,
                                     std::optional<Tensor> status, std::optional<Tensor> constants,
                                     int64_t activation, double negative_slope,
                                     std::optional<Tensor> mask);

namespace cpu {
StatsFunction batch_norm_stats;
ApplyFunction batch_norm_apply;
BackwardReduceFunction batch_norm_backward_reduce;
BackwardApplyFunction batch_norm_backward_apply;
}  // namespace cpu

namespace cuda {
StatsFunction batch_norm_stats;
ApplyFunction batch_norm_apply;
BackwardReduceFunction batch_norm_backward_reduce;
BackwardApplyFunction batch_norm_backward_apply;
}  // namespace cuda

}  // namespace syncbn
