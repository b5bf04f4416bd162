// The operators as functions of the CPU and of the CUDA library, and those of a single process,
// which join them without an all-reduce in between. csrc/ops.cpp describes them.
#pragma once

#include "allocate.h"
#include "checks.h"

namespace syncbn {

using StatsResults = std::tuple<Tensor>;                            // message
using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // output, mean, invstd, count
using ReduceResults = std::tuple<Tensor, Tensor, Tensor>;           // sums, grad_weight, grad_bias
using BackwardApplyResults = std::tuple<Tensor>;                    // grad_input
using VerifyResults = std::tuple<Tensor>;                           // verified

namespace cpu {
StatsResults batch_norm_stats(const ForwardArguments& a);
ForwardResults batch_norm_apply(const ForwardArguments& a);
ReduceResults batch_norm_backward_reduce(const BackwardArguments& a);
BackwardApplyResults batch_norm_backward_apply(const BackwardArguments& a);
}  // namespace cpu

namespace cuda {
StatsResults batch_norm_stats(const ForwardArguments& a);
ForwardResults batch_norm_apply(const ForwardArguments& a);
ReduceResults batch_norm_backward_reduce(const BackwardArguments& a);
BackwardApplyResults batch_norm_backward_apply(const BackwardArguments& a);
}  // namespace cuda

template <auto kReduce>
std::tuple<Tensor, Tensor, Tensor, Tensor> reduce_dz(BackwardArguments& a) {
  check_input(a.input);
  a.dz = allocate_like(a.input);
  return std::tuple_cat(kReduce(a), std::make_tuple(*a.dz));
}

template <auto kStats, auto kApply>
ForwardResults single_process_forward(ForwardArguments& a) {
  a.totals = std::get<0>(kStats(a));
  check_more_than_one_value(a.input);
  if (a.mask.has_value() && a.input.is_cpu()) {
    check_more_than_one_value(
        static_cast<const double*>(required(a.totals).const_data_ptr())[2 * a.input.size(1)]);
  }
  return kApply(a);
}

template <auto kReduce, auto kApply>
std::tuple<Tensor, Tensor, Tensor> single_process_backward(BackwardArguments& a) {
  auto [sums, grad_weight, grad_bias] = kReduce(a);
  a.sums = sums;
  return {std::get<0>(kApply(a)), grad_weight, grad_bias};
}

}  // namespace syncbn
