#include "call.h"

// The plan of a reduction for three tensors like the input.
extern "C" const char* plan(const Call* call, const void* a, const void* b, const void* c,
                            int64_t* fields) {
  return run(*call, [&] {
    const Plan plan = plan_of(*call, kReduction, {a, b, c});
    const int64_t values[] = {
        plan.is_matrix, plan.vector,  plan.aligned,
        plan.block_x,   plan.block_y, plan.tiles,
        plan.splits,    plan.share,   plan.is_matrix ? plan.geometry.inner : plan.vector};
    std::copy(std::begin(values), std::end(values), fields);
  });
}
