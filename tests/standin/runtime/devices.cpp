// Devices: their number, the current one of each thread, and waiting for all work of one.
#include "devices.h"

#include <pthread.h>

#include "captures.h"
#include "errors.h"
#include "operators.h"
#include "settings.h"
#include "standin.h"
#include "streams.h"
#include "waits.h"

namespace standin {
namespace {

thread_local int device_of_thread = 0;

// Whether this process is a fork of one that has counted the devices: CUDA is refused in it then.
bool is_fork_of_user = false;

cudaError_t refuse_in_fork() {
  return is_fork_of_user ? fail(cudaErrorInitializationError,
                                "this process is a fork of one that has used CUDA")
                         : cudaSuccess;
}

}  // namespace

int current_device() { return device_of_thread; }

bool is_device(int device) { return device >= 0 && device < settings().num_devices; }

}  // namespace standin

using namespace standin;

STANDIN_API cudaError_t cudaGetDeviceCount(int* number) {
  *number = 0;
  if (const cudaError_t error = refuse_in_fork()) {
    return error;
  }
  [[maybe_unused]] static const int kRegistered =
      pthread_atfork(nullptr, nullptr, [] { is_fork_of_user = true; });
  load_operators();
  *number = settings().num_devices;
  return *number == 0 ? fail(cudaErrorNoDevice) : cudaSuccess;
}

STANDIN_API cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return settings().num_devices == 0 ? fail(cudaErrorNoDevice) : cudaSuccess;
}

STANDIN_API cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = refuse_in_fork()) {
    return error;
  }
  if (!is_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  device_of_thread = device;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceSynchronize() {
  log_wait("cudaDeviceSynchronize");
  if (const cudaError_t error = refuse_if_unsafe("cudaDeviceSynchronize")) {
    return error;
  }
  synchronize_device(device_of_thread);
  return check_device(device_of_thread);
}

STANDIN_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

// Memory of all devices is the host's, so each can read each other's.
STANDIN_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
