// Kernels that test the emulation: one has all operations of a warp, the other is a reduction with
// one fault at a time.
//   sample_kernels warp_operations|none|FAULT ORDER
// prints "passed", or prints the found fault on stderr and fails.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "emulation.h"

using syncbn::cuda::launch;
using syncbn::cuda::shared_memory;

namespace {

enum Fault {
  kNone,
  kMissingSyncthreads,        // before thread 0 reads the warps' sums
  kMissingSecondSyncthreads,  // before the next channel overwrites the sums that thread 0 reads
  kMissingThreadfence,
  kLatePartial,  // the counter says "done" before the partial sum is written
  kOutOfBoundsLane,
  kThreadsExitBeforeBarrier,
  kLanesExitBeforeShuffle,
  kLanesAtBarrierAndShuffle,
  kShufflesOfTwoSizes,
  kPartialWarp,
  kPartialMask,
  kMisalignedLoad,
  kSharedOverflow,
  kSharedTooSmall,
  kNumFaults,
};

const char* const kNames[] = {"none",
                              "missing_syncthreads",
                              "missing_second_syncthreads",
                              "missing_threadfence",
                              "late_partial",
                              "out_of_bounds_lane",
                              "threads_exit_before_barrier",
                              "lanes_exit_before_shuffle",
                              "lanes_at_barrier_and_shuffle",
                              "shuffles_of_two_sizes",
                              "partial_warp",
                              "partial_mask",
                              "misaligned_load",
                              "shared_overflow",
                              "shared_too_small"};

constexpr int kBlocks = 7;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kChannels = 3;
constexpr int kSize = 1003;  // values of a channel: the last block has fewer

struct Shared {
  double sums[kWarps];
};

__device__ double warp_sum(double value) {
  for (int delta = 16; delta > 0; delta /= 2) {
    value += __shfl_down_sync(0xffffffff, value, delta);
  }
  return value;
}

// Sums the channels of a (channels, size) array: each block sums a chunk of each channel, and the
// block that finishes last adds up the partial sums.
template <Fault fault>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const float* __restrict__ input, int size, double* __restrict__ partials,
               unsigned* __restrict__ counters, double* __restrict__ output) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  auto& shared = shared_memory<Shared>();
  for (int channel = 0; channel < kChannels; ++channel) {
    double sum = 0;
    const int step = gridDim.x * blockDim.x;
    const int end = fault == kOutOfBoundsLane ? (size + step - 1) / step * step : size;
    for (int i = blockIdx.x * blockDim.x + thread; i < end; i += step) {
      sum += input[channel * size + i];
    }

    if (fault == kThreadsExitBeforeBarrier && warp == 2) {
      return;
    }
    if (fault == kLanesExitBeforeShuffle && lane == 5) {
      return;
    }
    if (fault == kLanesAtBarrierAndShuffle && lane == 31) {
      __syncthreads();
    }
    if (fault == kShufflesOfTwoSizes && lane == 7) {
      __shfl_down_sync(0xffffffff, 0.0f, 16);
    }
    if (fault == kPartialMask) {
      __syncwarp(0xffff);
    }
    if (fault == kMisalignedLoad) {
      sum += __ldcs(reinterpret_cast<const uint4*>(input + 1)).x;
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      shared.sums[fault == kSharedOverflow ? warp + 1 : warp] = sum;
    }
    if (fault != kMissingSyncthreads) {
      __syncthreads();
    }
    if (thread == 0) {
      double block_sum = 0;
      for (double one : shared.sums) {
        block_sum += one;
      }
      double& partial = partials[channel * gridDim.x + blockIdx.x];
      if (fault != kLatePartial) {
        partial = block_sum;
      }
      if (fault != kMissingThreadfence) {
        __threadfence();
      }
      const bool is_last = atomicInc(&counters[channel], gridDim.x - 1) == gridDim.x - 1;
      if (fault == kLatePartial) {
        partial = block_sum;
      }
      if (is_last) {
        output[channel] = 0;
        for (unsigned block = 0; block < gridDim.x; ++block) {
          output[channel] += partials[channel * gridDim.x + block];
        }
      }
    }
    if (fault != kMissingSecondSyncthreads) {
      __syncthreads();
    }
  }
}

template <int fault>
void check(const std::string& name) {
  if constexpr (fault < kNumFaults) {
    if (name != kNames[fault]) {
      return check<fault + 1>(name);
    }
    std::vector<float> input(kChannels * kSize);
    double expected[kChannels] = {}, output[kChannels] = {};
    for (int i = 0; i < kChannels * kSize; ++i) {
      input[i] = i % (i / kSize + 17);
      expected[i / kSize] += input[i];
    }
    std::vector<double> partials(kChannels * kBlocks, std::nan(""));
    std::vector<unsigned> counters(kChannels, 0);
    launch(sum_kernel<Fault(fault)>, kBlocks, fault == kPartialWarp ? kThreads - 1 : kThreads,
           sizeof(Shared) - (fault == kSharedTooSmall), nullptr, input.data(), kSize,
           partials.data(), counters.data(), output);
    for (int channel = 0; channel < kChannels; ++channel) {
      if (output[channel] != expected[channel] || counters[channel] != 0) {
        throw std::runtime_error("wrong sum " + std::to_string(output[channel]));
      }
    }
  } else {
    throw std::runtime_error("no fault " + name);
  }
}

struct WarpResults {
  int down;            // from 5 lanes on
  unsigned down_of_8;  // from 3 lanes on in sections of 8
  float exchanged;     // with the lane whose number differs in the bit of 4
  double broadcast;    // from lane 9
  int broadcast_of_8;  // from lane 2 of sections of 8
  unsigned ballot;     // of multiples of 3
  int any;             // that is 31
  int none;            // that is 32
};

__global__ void warp_kernel(WarpResults* results) {
  constexpr unsigned kAll = 0xffffffff;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32;
  results[thread] = {__shfl_down_sync(kAll, lane, 5),
                     __shfl_down_sync(kAll, static_cast<unsigned>(lane), 3, 8),
                     __shfl_xor_sync(kAll, static_cast<float>(lane), 4),
                     __shfl_sync(kAll, static_cast<double>(lane), 9),
                     __shfl_sync(kAll, lane, 2, 8),
                     __ballot_sync(kAll, lane % 3 == 0),
                     __any_sync(kAll, lane == 31),
                     __any_sync(kAll, lane == 32)};
}

void check_warp_operations() {
  std::vector<WarpResults> results(64);
  launch(warp_kernel, 1, dim3(16, 4), 0, nullptr, results.data());
  for (int thread = 0; thread < 64; ++thread) {
    const WarpResults& r = results[thread];
    const int lane = thread % 32;
    if (r.down != (lane + 5 < 32 ? lane + 5 : lane) ||
        r.down_of_8 != unsigned(lane % 8 + 3 < 8 ? lane + 3 : lane) || r.exchanged != (lane ^ 4) ||
        r.broadcast != 9 || r.broadcast_of_8 != lane / 8 * 8 + 2 || r.ballot != 0x49249249 ||
        !r.any || r.none) {
      throw std::runtime_error("wrong result in thread " + std::to_string(thread));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  using emulation::Order;
  if (argc != 3) {
    return 2;
  }
  const std::string order = argv[2];
  emulation::order = order == "reverse"    ? Order::kReverse
                     : order == "shuffled" ? Order::kShuffled
                                           : Order::kForward;
  try {
    if (argv[1] == std::string("warp_operations")) {
      check_warp_operations();
    } else {
      check<0>(argv[1]);
    }
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::puts("passed");
}
