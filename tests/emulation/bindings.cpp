// The CUDA operators on emulated threads, for ctypes: in place of csrc/cuda's adapters.
//
// Each function returns an error message or nullptr. Workspaces are like the adapters', but partial
// sums are NaN; counters must be zero again after each launch.

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/geometry.h"
#include "cuda/kernels/launchers.h"
#include "grid.h"

using namespace syncbn;
using namespace syncbn::cuda;

namespace {

// Shape, strides and dtype of the input.
struct Call {
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;
  DType dtype;
  int multiprocessors;
  emulation::Order order;
};

Plan plan_of(const Call& call, const KernelKind& kind,
             std::initializer_list<const void*> pointers) {
  const auto geometry = find_geometry(call.sizes, call.strides, call.dim);
  if (!geometry.has_value()) {
    throw std::runtime_error("neither contiguous nor channels-last");
  }
  return make_plan(kind, *geometry, call.dtype, pointers, call.multiprocessors);
}

template <typename Function>
const char* run(const Call& call, const Function& function) {
  static std::string message;
  emulation::order = call.order;
  emulation::unwritten = {};
  try {
    function();
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

template <typename Function>
void with_workspace(const Plan& plan, const Function& function) {
  // Arrays of exactly this size: AddressSanitizer finds accesses past them.
  const auto partials = std::make_unique<double[]>(plan.num_partials());
  const auto counters = std::make_unique<unsigned[]>(plan.num_counters());
  std::fill_n(partials.get(), plan.num_partials(), std::nan(""));
  const auto begin = reinterpret_cast<uint64_t>(partials.get());
  emulation::unwritten = {begin, begin + plan.num_partials() * sizeof(double)};
  function(Workspace{partials.get(), counters.get()});
  for (int64_t i = 0; i < plan.num_counters(); ++i) {
    if (counters[i] != 0) {
      throw std::runtime_error("counter " + std::to_string(i) + " is left at " +
                               std::to_string(counters[i]));
    }
  }
}

}  // namespace

extern "C" {

// Has the following launches run only their last block, or all.
void run_last_block(bool only) { emulation::runs_last_block = only; }

// The plan of a reduction for three tensors like the input.
const char* plan(const Call* call, const void* a, const void* b, const void* c, int64_t* fields) {
  return run(*call, [&] {
    const Plan plan = plan_of(*call, kReduction, {a, b, c});
    const int64_t values[] = {
        plan.is_matrix, plan.vector,  plan.aligned,
        plan.block_x,   plan.block_y, plan.tiles,
        plan.splits,    plan.segment, plan.is_matrix ? plan.geometry.inner : plan.vector};
    std::copy(std::begin(values), std::end(values), fields);
  });
}

const char* batch_norm_stats(const Call* call, const void* input, double* message,
                             const Tail* tail) {
  return run(*call, [&] {
    const Plan plan = plan_of(*call, kReduction, {input});
    with_workspace(plan, [&](Workspace workspace) {
      launch_batch_norm_stats(plan, nullptr, input, message, *tail, workspace);
    });
  });
}

const char* batch_norm_apply(const Call* call, const void* input, const double* totals,
                             const ChannelVector* weight, const ChannelVector* bias,
                             const ChannelVector* running_mean, const ChannelVector* running_var,
                             int64_t* num_batches_tracked, bool cumulative, double momentum,
                             double eps, void* output, double* mean, double* invstd, double* count,
                             const Verifier* verifier, const Epilogue* epilogue) {
  return run(*call, [&] {
    std::vector<int64_t> before(1);
    const RunningStatistics running{*running_mean, *running_var, num_batches_tracked,
                                    before.data(), cumulative,   momentum};
    launch_batch_norm_apply(plan_of(*call, kElementwise, {input, epilogue->residual, output}),
                            nullptr, input, totals, *verifier, *weight, *bias, running, eps, output,
                            mean, invstd, count, *epilogue);
  });
}

const char* batch_norm_backward_reduce(const Call* call, const void* grad_output, const void* input,
                                       const double* mean, const double* invstd, double* sums,
                                       const ChannelVector* grad_weight,
                                       const ChannelVector* grad_bias, const Tail* tail,
                                       const EpilogueGradient* epilogue) {
  return run(*call, [&] {
    const Plan plan =
        plan_of(*call, kReduction,
                {grad_output, input, epilogue->residual, epilogue->output, epilogue->dz});
    with_workspace(plan, [&](Workspace workspace) {
      launch_batch_norm_backward_reduce(plan, nullptr, grad_output, input, mean, invstd, sums,
                                        *tail, *grad_weight, *grad_bias, workspace, *epilogue);
    });
  });
}

const char* batch_norm_backward_apply(const Call* call, const void* grad_output, const void* input,
                                      const double* mean, const double* invstd,
                                      const ChannelVector* weight, const double* sums,
                                      const double* count, void* grad_input,
                                      const Verifier* verifier, const EpilogueGradient* epilogue) {
  return run(*call, [&] {
    launch_batch_norm_backward_apply(plan_of(*call, kElementwise, {grad_output, input, grad_input}),
                                     nullptr, grad_output, input, mean, invstd, *weight, sums,
                                     *verifier, count, grad_input, *epilogue);
  });
}

const char* verify_sums(const Call* call, const double* sums, int64_t size,
                        const Verifier* verifier, const Expectation* other, double* verified) {
  return run(*call, [&] { launch_verify_sums(nullptr, sums, size, *verifier, *other, verified); });
}

}  // extern "C"
