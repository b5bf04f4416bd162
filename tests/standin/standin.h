// The interface between the parts of the stand-in: its CUDA runtime exports these functions, and
// the other libraries call them.
#pragma once

#include <cstddef>
#include <cstdint>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

// Kernels. `sizes` are the sizes of a kernel's arguments in bytes, `name` is nvcc's name of it.
using StandinKernel = void (*)(const void* data, const unsigned* grid, const unsigned* block,
                               size_t shared_bytes, const void* const* arguments);
STANDIN_API void standin_register_kernel(const char* name, const size_t* sizes, size_t number,
                                         StandinKernel kernel, const void* data);

// Finds the allocation that holds an address; `device` is -1 for pinned memory of the host.
STANDIN_API bool standin_find_allocation(uint64_t address, uint64_t* begin, uint64_t* end,
                                         int* device);

// The device whose work this thread runs; -1 outside of work.
STANDIN_API int standin_running_device();

// Returns the events since the last call, a line each: "kernel NAME", "copy NAME", "wait NAME",
// "allocation NAME" or "collective NAME".
STANDIN_API const char* standin_take_log();

// Adds a line to the log.
STANDIN_API void standin_log(const char* kind, const char* name);

// Makes a launch of a registered kernel fail: number 1 is the next one. `with_device`: the device
// fails as well.
STANDIN_API void standin_fail_launch(int number, bool with_device);

#ifndef STANDIN_WITHOUT_CUDA  // the emulated threads have a dim3 of their own
#include <cuda_runtime_api.h>

// Work of a stream: run(context) once everything before it has run, then drop(context). Captured
// work runs at each launch of its graph. run may throw a std::exception: then the device has
// failed.
struct StandinWork {
  const char* kind;  // "kernel", "copy" or "collective"
  const char* name;
  void (*run)(void* context);
  void (*drop)(void* context);
  void* context;
};
STANDIN_API cudaError_t standin_enqueue(cudaStream_t stream, const StandinWork* work);

// Waits for a stream. The log shows no wait.
STANDIN_API void standin_flush(cudaStream_t stream);

STANDIN_API bool standin_is_capturing(cudaStream_t stream);
#endif
