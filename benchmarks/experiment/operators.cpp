// One operator of a variant of the kernels, for ctypes: with nvcc's kernels or emulated ones.
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/geometry.h"
#include "cuda/kernels/launchers.h"

using namespace syncbn;
using namespace syncbn::cuda;

namespace {

enum Operator : int64_t { kStats, kApply, kBackwardReduce, kBackwardApply };

// operators.py has the same fields. Weights, biases, running statistics and gradients are float32.
struct Arguments {
  Operator op;
  int64_t dtype;
  int64_t multiprocessors;
  int64_t outer;
  int64_t channels;
  int64_t inner;
  int64_t num_partials;  // the size of the workspace
  int64_t num_counters;
  void* stream;
  const void* x;
  const void* dy;
  void* out;
  double* message;
  double* mean;
  double* invstd;
  double* count;
  double* sums;
  float* weight;
  float* bias;
  float* running_mean;
  float* running_var;
  int64_t* num_batches_tracked;
  float* grad_weight;
  float* grad_bias;
  double* partials;
  unsigned* counters;
};

Plan plan_of(const KernelKind& kind, const Arguments& a,
             std::initializer_list<const void*> tensors) {
  const Geometry geometry{a.outer, a.channels, a.inner};
  const Plan plan = make_plan(kind, geometry, static_cast<DType>(a.dtype), tensors,
                              static_cast<int>(a.multiprocessors));
  if (plan.num_partials() > a.num_partials || plan.num_counters() > a.num_counters) {
    throw std::runtime_error("expected a workspace of " + std::to_string(plan.num_partials()) +
                             " partial sums and " + std::to_string(plan.num_counters()) +
                             " counters");
  }
  return plan;
}

void run(const Arguments& a) {
  const auto vector = [](float* data) { return ChannelVector{data, 1, DType::kFloat}; };
  const Workspace workspace{a.partials, a.counters};
  switch (a.op) {
    case kStats:
      return launch_batch_norm_stats(plan_of(kReduction, a, {a.x}), a.stream, a.x, a.message, {},
                                     workspace);
    case kApply: {
      RunningStatistics running;
      running.mean = vector(a.running_mean);
      running.var = vector(a.running_var);
      running.num_batches_tracked = a.num_batches_tracked;
      running.momentum = 0.1;
      return launch_batch_norm_apply(plan_of(kElementwise, a, {a.x, a.out}), a.stream, a.x,
                                     a.message, {}, vector(a.weight), vector(a.bias), running,
                                     /*eps=*/1e-5, a.out, a.mean, a.invstd, a.count);
    }
    case kBackwardReduce:
      return launch_batch_norm_backward_reduce(
          plan_of(kReduction, a, {a.dy, a.x}), a.stream, a.dy, a.x, a.mean, a.invstd, a.sums, {},
          vector(a.grad_weight), vector(a.grad_bias), workspace);
    case kBackwardApply:
      return launch_batch_norm_backward_apply(plan_of(kElementwise, a, {a.dy, a.x, a.out}),
                                              a.stream, a.dy, a.x, a.mean, a.invstd,
                                              vector(a.weight), a.sums, {}, a.count, a.out);
  }
}

}  // namespace

// Returns an error, or nullptr.
extern "C" const char* run_operator(const Arguments* arguments) {
  static std::string message;
  try {
    run(*arguments);
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}
