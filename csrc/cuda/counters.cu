#include <map>
#include <mutex>
#include <utility>

#include "counters.h"

namespace syncbn::cuda {
namespace {

// 4 MB: the streams of a process, and captures of a hundred models of a hundred layers.
constexpr int64_t kNumCounters = 1 << 20;
// More than a reduction's tiles wherever it is split: those fill each multiprocessor once at most.
constexpr int64_t kCountersOfStream = 1024;

// In the binary, so that they are zero without a launch, inside of a graph as well.
__device__ unsigned int counters[kNumCounters];

struct Allotment {
  int64_t taken = 0;
  std::map<cudaStream_t, int64_t> of_stream;
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // another stream captures; the launch itself will say so
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

// Where `number` counters begin, or -1.
int64_t allot(Allotment& allotment, int64_t number) {
  if (allotment.taken + number > kNumCounters) {
    return -1;
  }
  allotment.taken += number;
  return allotment.taken - number;
}

}  // namespace

unsigned int* take_counters(int device, cudaStream_t stream, int64_t number) {
  static std::mutex mutex;
  static std::map<int, Allotment> allotments;
  const bool own = number > kCountersOfStream || is_capturing(stream);

  const std::lock_guard<std::mutex> lock(mutex);
  Allotment& allotment = allotments[device];
  int64_t first;
  if (own) {
    first = allot(allotment, number);
  } else {
    const auto found = allotment.of_stream.find(stream);
    first =
        found != allotment.of_stream.end() ? found->second : allot(allotment, kCountersOfStream);
    if (first >= 0) {
      allotment.of_stream[stream] = first;
    }
  }
  void* address = nullptr;
  if (first < 0 || cudaGetSymbolAddress(&address, counters) != cudaSuccess) {
    return nullptr;
  }
  return static_cast<unsigned int*>(address) + first;
}

}  // namespace syncbn::cuda
