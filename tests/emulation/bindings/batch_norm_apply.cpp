#include "call.h"

extern "C" const char* batch_norm_apply(const Call* call, const void* input, const double* totals,
                                        const ChannelVector* weight, const ChannelVector* bias,
                                        const ChannelVector* running_mean,
                                        const ChannelVector* running_var,
                                        int64_t* num_batches_tracked, bool cumulative,
                                        double momentum, double eps, void* output, double* mean,
                                        double* invstd, double* count, const Verifier* verifier,
                                        const Epilogue* epilogue) {
  return run(*call, [&] {
    std::vector<int64_t> before(1);
    const RunningStatistics running{*running_mean, *running_var, num_batches_tracked,
                                    before.data(), cumulative,   momentum};
    launch_batch_norm_apply(plan_of(*call, kElementwise, {input, epilogue->residual, output}),
                            nullptr, input, totals, *verifier, *weight, *bias, running, eps, output,
                            mean, invstd, count, *epilogue);
  });
}
