// The reduction of what a block's threads have to two sums per channel over all blocks.
//
// Within a block threads merge pairwise, through shared memory. If a tile of channels is split over
// blocks, each writes its sums to the workspace, and the block that finishes last, as an integer
// counter tells, adds all of them up. Every order is fixed, so the bits are the same on each run;
// and atomicInc leaves the counter at zero for the next launch.
#pragma once

#include "device.h"
#include "operators.h"

namespace syncbn::cuda {

// State is a struct of values of type A alone.
template <typename A, typename State>
struct ReductionMemory {
  static constexpr int kWords = sizeof(State) / sizeof(A);
  double first[kMaxThreads];
  double second[kMaxThreads];
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

// Calls write(channel, first, second) once for each channel with the sums over all blocks, in the
// block that has them. Before it, one thread for each channel of the tile has put the block's sums
// into memory.first and memory.second.
template <typename Memory, typename Write>
__device__ void finish_reduction(Memory& memory, int64_t channels, int64_t tile_channels,
                                 Workspace workspace, const Write& write) {
  const int thread = thread_index();
  const int64_t first_channel = blockIdx.x * tile_channels;
  const auto owned = static_cast<int>(
      first_channel + tile_channels < channels ? tile_channels : channels - first_channel);
  const auto splits = static_cast<int>(gridDim.y);
  __syncthreads();
  if (splits > 1) {
    double* const partials = workspace.partials + first_channel;  // [splits][2][channels]
    if (thread < owned) {
      double* const mine = partials + 2 * channels * blockIdx.y + thread;
      mine[0] = memory.first[thread];
      mine[channels] = memory.second[thread];
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) {
      memory.is_last = atomicInc(&workspace.counters[blockIdx.x], splits - 1) == splits - 1u;
    }
    __syncthreads();
    if (!memory.is_last) {
      return;
    }
    __threadfence();

    // A reader of a channel adds up every readers-th partial sum, then readers add up by halves.
    const int readers = num_readers(static_cast<int>(blockDim.x * blockDim.y), owned, splits);
    const int reader = thread / owned;
    double first = 0;
    double second = 0;
    const int end = reader < readers ? splits : 0;
    for (int split = reader; split < end; split += kPartialLoads * readers) {
      double loaded[2][kPartialLoads];
#pragma unroll
      for (int k = 0; k < kPartialLoads; ++k) {
        const bool exists = split + k * readers < splits;
        const double* const theirs =
            partials + 2 * channels * (split + k * readers) + thread % owned;
        loaded[0][k] = exists ? theirs[0] : 0;
        loaded[1][k] = exists ? theirs[channels] : 0;
      }
#pragma unroll
      for (int k = 0; k < kPartialLoads; ++k) {
        first += loaded[0][k];
        second += loaded[1][k];
      }
    }
    memory.first[thread] = first;
    memory.second[thread] = second;
    for (int half = readers / 2; half > 0; half /= 2) {
      __syncthreads();
      if (reader < half) {
        first += memory.first[thread + half * owned];
        second += memory.second[thread + half * owned];
        memory.first[thread] = first;
        memory.second[thread] = second;
      }
    }
  }
  if (thread < owned) {
    write(first_channel + thread, memory.first[thread], memory.second[thread]);
  }
}

}  // namespace syncbn::cuda
