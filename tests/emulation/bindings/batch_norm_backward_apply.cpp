#include "call.h"

extern "C" const char* batch_norm_backward_apply(const Call* call, const void* grad_output,
                                                 const void* input, const double* mean,
                                                 const double* invstd, const ChannelVector* weight,
                                                 const double* sums, const double* count,
                                                 void* grad_input, const Verifier* verifier,
                                                 const EpilogueGradient* epilogue) {
  return run(*call, [&] {
    launch_batch_norm_backward_apply(plan_of(*call, kElementwise, {grad_output, input, grad_input}),
                                     nullptr, grad_output, input, mean, invstd, *weight, sums,
                                     *verifier, count, grad_input, *epilogue);
  });
}
