// The counters in which the blocks of a split reduction meet: zero before each launch and after it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace syncbn::cuda {

// Asks for the address of the counters of `device`, the current one, unless a stream captures: that
// may load code, which a capture may forbid.
void locate_counters(int device, cudaStream_t stream);

// Returns `number` counters of `device`, the current one, that no launch uses that may run at the
// same time as this one, or null where there are none: the caller then needs to make some.
//
// Launches on one stream follow each other and share theirs. A launch that is captured into a graph
// gets its own for good: graphs run on any stream.
unsigned int* take_counters(int device, cudaStream_t stream, int64_t number);

}  // namespace syncbn::cuda
