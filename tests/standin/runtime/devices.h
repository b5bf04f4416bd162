// The device of a thread, which cudaSetDevice() chooses.
#pragma once

#include <cuda_runtime_api.h>

namespace standin {

int current_device();

bool is_device(int device);

}  // namespace standin
