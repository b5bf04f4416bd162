#include "call.h"

extern "C" const char* batch_norm_backward_reduce(const Call* call, const void* grad_output,
                                                  const void* input, const double* mean,
                                                  const double* invstd, double* sums,
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
