#include <map>
#include <mutex>

#include "counters.h"

namespace syncbn::cuda {
namespace {

// 4 MB: enough for two hundred streams, or for captures of a hundred models of a hundred layers.
constexpr int64_t kNumCounters = 1 << 20;
// More than the tiles of a split reduction, usually at most nine for each resident block (plan.h),
// on GPUs of up to 227 multiprocessors.
constexpr int64_t kCountersOfStream = 4096;

// Part of the binary: zero without a launch, in a captured graph, too.
__device__ unsigned int counters[kNumCounters];

// The allotted counters of a device.
struct Allotment {
  unsigned int* counters = nullptr;  // the address of the device's counters, or null: not known yet
  int64_t taken = 0;
  // By CUDA's number of the stream. A new stream may get the handle of a destroyed one, whose work
  // may still run.
  std::map<unsigned long long, unsigned int*> of_stream;
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // another stream captures; the launch itself will report it
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

struct Allotments {
  std::mutex mutex;
  std::map<int, Allotment> of_device;
};

Allotments& allotments() {
  static Allotments all;
  return all;
}

// Asks for the address, which stays null after an error. Not during a capture: the call may load
// code, which a capture may forbid.
void locate(Allotment& allotment) {
  if (allotment.counters == nullptr) {
    void* address = nullptr;
    if (cudaGetSymbolAddress(&address, counters) != cudaSuccess) {
      cudaGetLastError();  // resets the error: the launch would report it
      return;
    }
    allotment.counters = static_cast<unsigned int*>(address);
  }
}

// Returns the first of `number` counters, or null.
unsigned int* allot(Allotment& allotment, int64_t number) {
  if (allotment.counters == nullptr || allotment.taken + number > kNumCounters) {
    return nullptr;
  }
  allotment.taken += number;
  return allotment.counters + allotment.taken - number;
}

}  // namespace

unsigned int* take_counters(int device, cudaStream_t stream, int64_t number) {
  const bool captured = is_capturing(stream);

  const std::lock_guard<std::mutex> lock(allotments().mutex);
  Allotment& allotment = allotments().of_device[device];
  if (captured) {
    return allot(allotment, number);
  }
  locate(allotment);
  // cudaStreamPerThread is another stream in each thread.
  if (number > kCountersOfStream || stream == cudaStreamPerThread) {
    return nullptr;
  }
  unsigned long long id = 0;
  if (cudaStreamGetId(stream, &id) != cudaSuccess) {
    cudaGetLastError();  // resets the error: the launch would report it
    return nullptr;
  }
  unsigned int*& of_stream = allotment.of_stream[id];
  if (of_stream == nullptr) {
    of_stream = allot(allotment, kCountersOfStream);
  }
  return of_stream;
}

}  // namespace syncbn::cuda
