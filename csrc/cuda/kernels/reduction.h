// The reduction of the threads' states to two sums per channel over all blocks.
//
// The threads of a block reduce their states to a few terms for each channel, sums in float64, and
// some threads add these up and convert them to the two sums. If a tile of channels is split
// over blocks, each block writes its channels' sums to the workspace; an integer counter shows
// which block finishes last, and this block adds up all sums. Every order is fixed: the bits are
// the same in each run. atomicInc leaves the counter at zero for the next launch. Launches with the
// same counters must not overlap: launches on one stream do not, unless programmatic dependent
// launch is used.
#pragma once

#include "device.h"
#include "launchers.h"

namespace syncbn::cuda {

constexpr unsigned int kAllLanes = 0xffffffff;

struct alignas(16) TwoSums {
  double first = 0;
  double second = 0;

  __device__ __forceinline__ void add(const TwoSums& other) {
    first += other.first;
    second += other.second;
  }
  // The sums of the thread `lanes` further in the warp.
  __device__ __forceinline__ TwoSums shuffle_down(int lanes) const {
    return {__shfl_down_sync(kAllLanes, first, lanes), __shfl_down_sync(kAllLanes, second, lanes)};
  }
};

// The sum over the warp, in each of its threads. All threads of the warp call it.
template <typename A>
__device__ __forceinline__ A add_up_warp(A value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, lanes);
  }
  return value;
}

template <typename Term>
struct ReductionMemory {
  Term terms[kMaxThreads];  // of the block's channels; a channel's terms are neighbors
  bool is_last;
};

// Two values for each column and each of the column's threads.
template <typename Term, typename A, int kColumns>
struct ColumnMemory : ReductionMemory<Term> {
  alignas(16) A first[kColumns * kMaxThreads];  // [member][column]
  alignas(16) A second[kColumns * kMaxThreads];
};

// Stores values at an address that is aligned to them, up to 16 bytes at once.
template <int kNumber, typename A>
__device__ __forceinline__ void put_columns(A* to, const A (&values)[kNumber]) {
  constexpr int kAtOnce = kNumber * sizeof(A) < 16 ? kNumber : 16 / sizeof(A);
  struct alignas(kAtOnce * sizeof(A)) Word {
    A values[kAtOnce];
  };
#pragma unroll
  for (int v = 0; v < kNumber; v += kAtOnce) {
    Word word;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      word.values[i] = values[v + i];
    }
    *reinterpret_cast<Word*>(to + v) = word;
  }
}

// The threads that add up `number` terms of each of a block's channels.
class Mergers {
 public:
  __device__ __forceinline__ Mergers(int channels, int number)
      : number_(number),
        log_mergers_(log_mergers(static_cast<int>(blockDim.x * blockDim.y), channels, number)),
        channel_(thread_index() >> log_mergers_),
        is_merger_(channel_ < channels) {}

  // Whether this thread gets the sums of its channel.
  __device__ __forceinline__ bool is_first() const { return is_merger_ && member() == 0; }
  __device__ __forceinline__ int channel() const { return channel_; }

  // Adds up load(channel, 0) to load(channel, number - 1) for the channel's first thread. All
  // threads of the block call it.
  template <typename Term, typename Load>
  __device__ Term add_up(const Load& load) const {
    // Each thread of a channel adds up every mergers-th term; then halves are added.
    const int mergers = 1 << log_mergers_;
    const int end = is_merger_ ? number_ : 0;
    Term result;
#pragma unroll 1  // otherwise the number of turns costs a division
    for (int i = member(); i < end; i += kStates * mergers) {
      Term terms[kStates];
#pragma unroll
      for (int k = 0; k < kStates; ++k) {
        if (i + k * mergers < number_) {
          terms[k] = load(channel_, i + k * mergers);
        }
      }
#pragma unroll
      for (const Term& term : terms) {
        result.add(term);
      }
    }
    const int in_warps = static_cast<int>(blockDim.x * blockDim.y) / kWarp * kWarp;
    if (thread_index() < in_warps) {
      for (int lanes = mergers / 2; lanes > 0; lanes /= 2) {
        result.add(result.shuffle_down(lanes));
      }
    }
    return result;
  }

 private:
  __device__ __forceinline__ int member() const {
    return thread_index() & ((1 << log_mergers_) - 1);
  }

  int number_;
  int log_mergers_;
  int channel_;
  bool is_merger_;
};

// Calls out.write(channel, out.load(channel), sums) once for each channel, in the block that has
// the sums over all blocks. Before the call, threads have written `terms` terms for each channel of
// the tile to memory.terms; out.to_sums(channel of the tile, sum of the terms) returns the block's
// sums.
template <typename Term, typename Output>
__device__ void finish_reduction(ReductionMemory<Term>& memory, int64_t channels,
                                 int64_t tile_channels, int terms, Workspace workspace,
                                 const Output& out) {
  const int64_t first_channel = blockIdx.x * tile_channels;
  const auto owned = static_cast<int>(
      first_channel + tile_channels < channels ? tile_channels : channels - first_channel);
  const auto splits = static_cast<int>(gridDim.y);
  const Mergers of_terms(owned, terms);
  const Mergers last(owned, splits > 1 ? splits : terms);
  const auto loaded = out.load(first_channel + (last.is_first() ? last.channel() : 0));
  __syncthreads();
  const Term of_block =
      of_terms.add_up<Term>([&](int channel, int i) { return memory.terms[channel * terms + i]; });
  TwoSums sums;
  if (of_terms.is_first()) {
    sums = out.to_sums(of_terms.channel(), of_block);
  }
  if (splits > 1) {
    // [channels][splits]
    auto* const partials = reinterpret_cast<TwoSums*>(workspace.partials) + first_channel * splits;
    if (of_terms.is_first()) {
      partials[of_terms.channel() * splits + blockIdx.y] = sums;
    }
    __syncthreads();
    if (thread_index() == 0) {
      // With the barriers around them, the fences cover the stores and loads of the whole block.
      __threadfence();
      memory.is_last = atomicInc(&workspace.counters[blockIdx.x], splits - 1) == splits - 1u;
      __threadfence();
    }
    __syncthreads();
    if (!memory.is_last) {
      return;
    }
    sums = last.add_up<TwoSums>(
        [&](int channel, int split) { return partials[channel * splits + split]; });
  }
  if (last.is_first()) {
    out.write(first_channel + last.channel(), loaded, sums);
  }
}

}  // namespace syncbn::cuda
