// Enqueues all work of streams and captures.
#pragma once

#include <cuda_runtime_api.h>

#include "work.h"

namespace standin {

// Enqueues work in a stream, or adds it to the capture that the stream takes part in. Refused in
// work that runs, on devices that have failed, and when the process ends.
cudaError_t enqueue(cudaStream_t stream, const WorkPointer& work);

// As enqueue(), for a launch: the stream must be one of the current device.
cudaError_t enqueue_launch(cudaStream_t stream, const WorkPointer& work);

}  // namespace standin
