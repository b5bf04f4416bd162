// The reduction of what a block's threads have to two sums per channel over all blocks.
//
// Within a block threads merge pairwise, through shared memory, to two sums for each term of a
// channel: it has one or, where the columns of a matrix are values of a plane, several. If a tile
// of channels is split over blocks, each writes the sums of its channels to the workspace, and the
// block that finishes last, as an integer counter tells, adds all of them up. Every order is fixed,
// so the bits are the same on each run; and atomicInc leaves the counter at zero for the next
// launch. Launches that share counters must not overlap, as those of one stream do not:
// programmatic dependent launch would break that.
#pragma once

#include "device.h"
#include "operators.h"

namespace syncbn::cuda {

struct TwoSums {
  double first = 0;
  double second = 0;

  __device__ __forceinline__ void add(const TwoSums& other) {
    first += other.first;
    second += other.second;
  }
};

// State is a struct of values of type A alone.
template <typename A, typename State>
struct ReductionMemory {
  static constexpr int kWords = sizeof(State) / sizeof(A);
  TwoSums terms[kMaxTerms];  // of the block's channels, those of a channel next to each other
  TwoSums sums[kMaxThreads];
  A exchange[kWords][kMaxThreads];
  bool is_last;
};

// Merges the states of all `members` of each of `groups` groups of threads into that of its member
// 0. All threads of the block call it.
template <typename A, typename State>
__device__ void merge_members(ReductionMemory<A, State>& memory, State& state, int member,
                              int members, int group, int groups) {
  constexpr int kWords = ReductionMemory<A, State>::kWords;
  // A step does not overwrite what the one before it reads: it writes in front of it.
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
  // A reader of a channel takes every readers-th, then readers add up by halves.
  const int readers = num_readers(static_cast<int>(blockDim.x * blockDim.y), channels, number);
  const int thread = thread_index();
  const int reader = thread / channels;
  const int channel = thread % channels;
  const int end = reader < readers ? number : 0;
  TwoSums result;
  for (int i = reader; i < end; i += kPartialLoads * readers) {
    TwoSums loaded[kPartialLoads];
#pragma unroll
    for (int k = 0; k < kPartialLoads; ++k) {
      if (i + k * readers < number) {
        loaded[k] = load(channel, i + k * readers);
      }
    }
#pragma unroll
    for (const TwoSums& one : loaded) {
      result.add(one);
    }
  }
  if (readers > 1) {
    memory.sums[thread] = result;
    for (int half = readers / 2; half > 0; half /= 2) {
      __syncthreads();
      if (reader < half) {
        result.add(memory.sums[thread + half * channels]);
        memory.sums[thread] = result;
      }
    }
  }
  return result;
}

// Calls write(channel, sums) once for each channel with the sums over all blocks, in the block that
// has them. Before it, threads have put `terms` sums for each channel of the tile into
// memory.terms.
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
      // The barriers around them make its fences cover the stores and loads of the whole block.
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
