#include "call.h"

extern "C" const char* batch_norm_stats(const Call* call, const void* input, double* message,
                                        const Tail* tail) {
  return run(*call, [&] {
    const Plan plan = plan_of(*call, kReduction, {input});
    with_workspace(plan, [&](Workspace workspace) {
      launch_batch_norm_stats(plan, nullptr, input, message, *tail, workspace);
    });
  });
}
