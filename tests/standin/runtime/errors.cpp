// Keeps the last error of each thread and the errors of devices, with their messages.
// Like the last error, its message is a thread's own: two threads that fail in two ways do not read
// each other's messages. The message of a failed device is for all threads.
#include "errors.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <set>

#include "devices.h"
#include "settings.h"
#include "standin.h"

namespace standin {
namespace {

class DeviceErrors {
 public:
  static DeviceErrors& get() {
    static DeviceErrors* const value = new DeviceErrors;
    return *value;
  }

  void fail(int device, const std::string& words) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_.emplace(device, words);  // the first failure is the one to report
  }

  bool has_failed(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failed_.count(device) != 0;
  }

  // Returns the message of the device's failure, or of any device's, or an empty string.
  std::string find_words(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = failed_.find(device);
    if (found != failed_.end()) {
      return found->second;
    }
    return failed_.empty() ? "" : failed_.begin()->second;
  }

  // Returns a copy at an address that stays valid. Equal messages are kept once.
  const char* keep(const std::string& words) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kept_.insert(words).first->c_str();
  }

 private:
  std::mutex mutex_;
  std::map<int, std::string> failed_;  // the message of each failed device
  std::set<std::string> kept_;
};

// What cudaGetLastError() of this thread returns.
thread_local cudaError_t last_error = cudaSuccess;

// The messages of this thread's errors, by their codes. Never destroyed: destructors of other
// thread-local objects may call the runtime.
std::map<cudaError_t, std::string>& words_of_thread() {
  thread_local auto* const value = new std::map<cudaError_t, std::string>;
  return *value;
}

struct Description {
  cudaError_t error;
  const char* name;
  const char* words;
};

constexpr Description kDescriptions[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

Description describe(cudaError_t error) {
  for (const Description& description : kDescriptions) {
    if (description.error == error) {
      return description;
    }
  }
  return {error, "an error of CUDA", "an error of CUDA that the stand-in has no words for"};
}

}  // namespace

cudaError_t fail(cudaError_t error, const std::string& words) {
  last_error = error;
  if (words.empty()) {
    words_of_thread().erase(error);
  } else {
    words_of_thread()[error] = "standin: " + words;
  }
  if (error != cudaErrorNotReady) {
    trace(std::string("error ") + describe(error).name + ": " + words);
  }
  return error;
}

void fail_device(int device, const std::string& words) {
  const std::string line = "standin: " + words;
  std::fprintf(stderr, "%s\n", line.c_str());
  DeviceErrors::get().fail(device, line);
}

cudaError_t find_device_error(int device) {
  return DeviceErrors::get().has_failed(device) ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t check_device(int device) {
  const cudaError_t error = find_device_error(device);
  if (error != cudaSuccess) {
    last_error = error;
  }
  return error;
}

}  // namespace standin

using namespace standin;

STANDIN_API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  const cudaError_t of_device = find_device_error(current_device());
  return of_device != cudaSuccess ? of_device : error;
}

STANDIN_API cudaError_t cudaPeekAtLastError() {
  const cudaError_t of_device = find_device_error(current_device());
  return of_device != cudaSuccess ? of_device : last_error;
}

STANDIN_API const char* cudaGetErrorString(cudaError_t error) {
  std::string words;
  if (error == cudaErrorLaunchFailure) {
    words = DeviceErrors::get().find_words(current_device());
  }
  const auto found = words_of_thread().find(error);
  if (words.empty() && found != words_of_thread().end()) {
    words = found->second;
  }
  return words.empty() ? describe(error).words : DeviceErrors::get().keep(words);
}

STANDIN_API const char* cudaGetErrorName(cudaError_t error) { return describe(error).name; }
