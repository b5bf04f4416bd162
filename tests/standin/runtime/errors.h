// Errors: the last one of each thread, with a message, and those of devices.
//
// A device on which work has failed stays failed, as a GPU does after an invalid memory access:
// each later call reports the error, and work behind the failed one does not run.
// cudaGetErrorString() returns the message, so torch's exceptions contain it.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace standin {

// Makes this the thread's last error and returns it. The message gets the prefix "standin: ";
// without one, cudaGetErrorString() returns CUDA's.
cudaError_t fail(cudaError_t error, const std::string& words = "");

// Fails the device for the rest of the process. The message is written to stderr, too.
void fail_device(int device, const std::string& words);

// Returns the error of a device that has failed, or cudaSuccess.
cudaError_t find_device_error(int device);

// As find_device_error(), and makes an error the thread's last one.
cudaError_t check_device(int device);

}  // namespace standin
