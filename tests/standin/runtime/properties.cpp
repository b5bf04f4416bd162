// The properties of a device: those of an H100, as far as torch or kernels ask for them.
//
// The number of multiprocessors decides how kernels divide their work. Attributes that nobody has
// asked for yet are errors rather than guesses.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "devices.h"
#include "errors.h"
#include "settings.h"
#include "standin.h"

using namespace standin;

STANDIN_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!is_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  constexpr int kMostThreads[] = {1024, 1024, 64};
  constexpr int kMostBlocks[] = {0x7fffffff, 65535, 65535};
  std::memset(properties, 0, sizeof(*properties));
  std::strncpy(properties->name, "standin H100", sizeof(properties->name) - 1);
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = settings().device_bytes;
  properties->sharedMemPerBlock = 49152;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  std::copy(std::begin(kMostThreads), std::end(kMostThreads), properties->maxThreadsDim);
  std::copy(std::begin(kMostBlocks), std::end(kMostBlocks), properties->maxGridSize);
  properties->totalConstMem = 65536;
  properties->major = 9;
  properties->multiProcessorCount = settings().num_multiprocessors;
  properties->unifiedAddressing = properties->canMapHostMemory = 1;
  properties->concurrentKernels = 1;
  properties->pciBusID = device + 1;
  properties->asyncEngineCount = 3;
  properties->l2CacheSize = 50 << 20;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->streamPrioritiesSupported = 1;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->sharedMemPerBlockOptin = 232448;
  properties->hostRegisterSupported = properties->canUseHostPointerForRegisteredMem = 1;
  properties->memoryPoolsSupported = 1;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) {
    return error;
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(properties.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = properties.maxGridSize[0];
      break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = 1;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      break;
    default:
      return fail(cudaErrorNotSupported,
                  "cudaDeviceGetAttribute of attribute " + std::to_string(attribute));
  }
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  if (!is_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  std::snprintf(id, static_cast<size_t>(size), "0000:%02X:00.0", static_cast<unsigned>(device + 1));
  return cudaSuccess;
}
