// The operators as functions, for alone.cpp, which joins them.
#pragma once

#include "../common/operators.h"

namespace syncbn::cpu {

StatsFunction batch_norm_stats;
ApplyFunction batch_norm_apply;
BackwardReduceFunction batch_norm_backward_reduce;
BackwardApplyFunction batch_norm_backward_apply;

}  // namespace syncbn::cpu
