// The reduction of the threads' states to two sums per channel over all blocks.
//
// The threads of a block merge pairwise, through shared memory, to two sums for each term. A
// channel has one term or, if the columns of a matrix are values of a plane, several. If a tile of
// channels is split over blocks, each block writes its channels' sums to the workspace; an integer
// counter shows which block finishes last, and this block adds up all sums. Every order is fixed:
// the bits are the same in each run. atomicInc leaves the counter at zero for the next launch.
// Launches with the same counters must not overlap: launches on one stream do not, unless
// programmatic dependent launch is used.
#pragma once

#include "device.h"
#include "launchers.h"

namespace syncbn::cuda {

struct TwoSums {
  double first = 0;
  double second = 0;

  __device__ __forceinline__ void add(const TwoSums& other) {
    first += other.first;
    second += other.second;
  }
};

// All members of State are of type A.
template <typename A, typename State>
struct ReductionMemory {
  static constexpr int kWords = sizeof(State) / sizeof(A);
  TwoSums terms[kMaxTerms];  // of the block's channels; a channel's terms are neighbors
  TwoSums sums[kMaxThreads];
  A exchange[kWords][kMaxThreads];
  bool is_last;
};

// Merges the states of all `members` of each of `groups` groups of threads into the state of its
// member 0. All threads of the block call it.
template <typename A, typename State>
__device__ void merge_members(ReductionMemory<A, State>& memory, State& state, int member,
                              int members, int group, int groups) {
  constexpr int kWords = ReductionMemory<A, State>::kWords;
  // The words that a step writes are in front of the words that the previous step reads.
  while (members > 1) {
    const int half = (members + 1) / 2;
    if (member >= half && member < members) {
      const A* words = reinterpret_cast<const A*>(&state);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        memory.exchange[w][member * groups + group] = words[w];
      }
    }
    __syncthreads();
    if (member + half < members) {
      State other;
      A* words = reinterpret_cast<A*>(&other);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] = memory.exchange[w][(member + half) * groups + group];
      }
      state.merge(other);
    }
    members = half;
  }
}

// Returns the sums of load(channel, 0) to load(channel, number - 1) to thread `channel`, for each
// of the block's first `channels`. All threads of the block call it.
template <typename Memory, typename Load>
__device__ TwoSums add_up(Memory& memory, int channels, int number, const Load& load) {
  // Each of a channel's reducing threads adds up every reducing-th sum; then halves are added.
  const int reducing =
      num_reducing_threads(static_cast<int>(blockDim.x * blockDim.y), channels, number);
  const int thread = thread_index();
  const int member = thread / channels;
  const int channel = thread % channels;
  const int end = member < reducing ? number : 0;
  TwoSums result;
  for (int i = member; i < end; i += kPartialLoads * reducing) {
    TwoSums loaded[kPartialLoads];
#pragma unroll
    for (int k = 0; k < kPartialLoads; ++k) {
      if (i + k * reducing < number) {
        loaded[k] = load(channel, i + k * reducing);
      }
    }
#pragma unroll
    for (const TwoSums& one : loaded) {
      result.add(one);
    }
  }
  if (reducing > 1) {
    memory.sums[thread] = result;
    for (int half = reducing / 2; half > 0; half /= 2) {
      __syncthreads();
      if (member < half) {
        result.add(memory.sums[thread + half * channels]);
        memory.sums[thread] = result;
      }
    }
  }
  return result;
}

// Calls write(channel, sums) once for each channel, in the block that has the sums over all blocks.
// Before the call, threads have written `terms` sums for each channel of the tile to memory.terms.
template <typename Memory, typename Write>
__device__ void finish_reduction(Memory& memory, int64_t channels, int64_t tile_channels, int terms,
                                 Workspace workspace, const Write& write) {
  const int thread = thread_index();
  const int64_t first_channel = blockIdx.x * tile_channels;
  const auto owned = static_cast<int>(
      first_channel + tile_channels < channels ? tile_channels : channels - first_channel);
  const auto splits = static_cast<int>(gridDim.y);
  __syncthreads();
  TwoSums sums = add_up(memory, owned, terms,
                        [&](int channel, int i) { return memory.terms[channel * terms + i]; });
  if (splits > 1) {
    double* const partials = workspace.partials + first_channel;  // [splits][2][channels]
    if (thread < owned) {
      double* const mine = partials + 2 * channels * blockIdx.y + thread;
      mine[0] = sums.first;
      mine[channels] = sums.second;
    }
    __syncthreads();
    if (thread == 0) {
      // With the barriers around them, the fences cover the stores and loads of the whole block.
      __threadfence();
      memory.is_last = atomicInc(&workspace.counters[blockIdx.x], splits - 1) == splits - 1u;
      __threadfence();
    }
    __syncthreads();
    if (!memory.is_last) {
      return;
    }
    sums = add_up(memory, owned, splits, [&](int channel, int split) {
      const double* const theirs = partials + 2 * channels * split + channel;
      return TwoSums{theirs[0], theirs[channels]};
    });
  }
  if (thread < owned) {
    write(first_channel + thread, sums);
  }
}

}  // namespace syncbn::cuda
