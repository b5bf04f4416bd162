// CUDA for the kernels: nvcc's, or the emulation of tests/emulation, which compiles the same
// kernels with a host compiler and runs CUDA threads as fibers.
#pragma once

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

// For the emulation, which checks the alignment; hardware checks it by itself.
#define SYNCBN_CHECK_ACCESS(pointer, num_bytes)

namespace syncbn::cuda {

// The block's dynamic shared memory. Kernels have no static shared memory.
template <typename T>
__device__ T& shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return *reinterpret_cast<T*>(bytes);
}

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t num_shared_bytes,
            cudaStream_t stream, Args... args) {
  kernel<<<grid, block, num_shared_bytes, stream>>>(args...);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice) {
    throw std::runtime_error(
        "syncbn: this build has no kernels for this GPU's architecture; rebuild it with the "
        "architecture in TORCH_CUDA_ARCH_LIST");
  }
  if (error != cudaSuccess) {
    throw std::runtime_error(
        std::string("syncbn: a CUDA kernel could not be launched, or an earlier one, perhaps not "
                    "syncbn's, has failed (CUDA_LAUNCH_BLOCKING=1 shows which): ") +
        cudaGetErrorString(error));
  }
}

}  // namespace syncbn::cuda

#else

#include "emulation.h"

#endif

namespace syncbn::cuda {

__device__ __forceinline__ int thread_index() { return threadIdx.y * blockDim.x + threadIdx.x; }

}  // namespace syncbn::cuda
