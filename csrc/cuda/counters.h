// The counters of finished blocks of a split reduction: zero before and after each launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace syncbn::cuda {

// Returns `number` counters of `device`, the current device, which no concurrent launch uses; or
// null if there are none: then the caller must allocate counters.
//
// Launches on one stream share counters, because they run one after another. A launch in a captured
// graph keeps its counters, because a graph may run on any stream.
unsigned int* take_counters(int device, cudaStream_t stream, int64_t number);

}  // namespace syncbn::cuda
