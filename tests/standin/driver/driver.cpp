// A CUDA driver (libcuda.so.1) of the few functions that torch calls itself; the runtime of the
// stand-in does not need it.
//
// Each device has its primary context from the beginning. Functions of optional features, such as
// expandable segments, are missing: build_standin.py and the runtime generate ones that write their
// name and fail.
#include <cuda.h>

#include "standin.h"

STANDIN_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

STANDIN_API CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGetErrorName(CUresult result, const char** name) {
  *name = result == CUDA_SUCCESS ? "CUDA_SUCCESS" : "an error of the stand-in's driver";
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGetErrorString(CUresult result, const char** words) {
  *words = result == CUDA_SUCCESS ? "no error" : "standin: the driver has no such function";
  return CUDA_SUCCESS;
}

// torch 2.15 asks for the driver's messages. The stand-in has none.
STANDIN_API CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {
  *handle = nullptr;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
