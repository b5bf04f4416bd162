// batch_norm_stats on CUDA: reads the input once.
//
// A thread loads chunks of 8 or 16 vectors into registers and computes from each its mean, then its
// squared deviations from the mean: as robust as Welford's method, without a division for each
// value. Chunks, then threads, are merged exactly in float (csrc/common/moments.h has the formula);
// the columns of a channel, if there are several, and blocks are added up in float64.
//
// Floats cannot hold the mean of values far from zero. So all threads of a channel or column first
// subtract one of its values, the pivot; and before the merge they subtract the mean of the first
// thread, so that the merge rounds only small numbers. Values of 16 bits need neither: their own
// rounding is coarser.

#include "../../common/message.h"
#include "../../common/moments.h"
#include "device.h"
#include "dispatch.h"
#include "launchers.h"
#include "matrix.h"
#include "planar.h"
#include "reduction.h"

namespace syncbn::cuda {
namespace {

// Count, mean and sum of squared deviations of the values of some channels.
template <typename A, int kChannels>
struct ChannelMoments {
  A count = 0;
  A mean[kChannels] = {};
  A m2[kChannels] = {};

  __device__ __forceinline__ void merge(const ChannelMoments& other) {
    if (other.count == 0) {
      return;
    }
    const A total = count + other.count;
    const A share = other.count / total;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      merge_channel(mean[c], m2[c], count, other.mean[c], other.m2[c], share);
    }
    count = total;
  }
};

template <typename T>
constexpr bool kPivoted = std::is_same_v<T, compute_t<T>>;

// Merges the moments of the threads of each group into the moments of its member 0, and adds to
// `pivot` the mean that it subtracts from them. All threads of the block call it.
template <bool kPivot, typename Memory, typename A, int kChannels>
__device__ void merge_moments(Memory& memory, ChannelMoments<A, kChannels>& state,
                              double (&pivot)[kChannels], int member, int members, int group,
                              int groups) {
  if constexpr (kPivot) {
    // merge_members() does not write here: it writes the states of the other members.
    if (member == 0) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        memory.exchange[c][group] = state.mean[c];
      }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const A first_mean = memory.exchange[c][group];
      if (state.count > 0) {
        state.mean[c] -= first_mean;
      }
      pivot[c] += first_mean;
    }
  }
  merge_members(memory, state, member, members, group, groups);
}

// Writes the moments of one of the block's terms as two sums of the message.
template <typename Memory, typename A>
__device__ void put_sums(Memory& memory, int term, double pivot, A count, A mean, A m2) {
  const Sums sums = to_sums(
      {static_cast<double>(count), pivot + static_cast<double>(mean), static_cast<double>(m2)});
  memory.terms[term] = {sums.values, sums.squares};
}

struct Output {
  double* message;
  double count;
  Tail tail;
  Workspace workspace;
};

template <typename Memory>
__device__ void finish_message(Memory& memory, int64_t channels, int64_t tile_channels, int terms,
                               const Output& out) {
  finish_reduction(memory, channels, tile_channels, terms, out.workspace,
                   [=](int64_t channel, const TwoSums& sums) {
                     out.message[channel] = sums.first;
                     out.message[channels + channel] = sums.second;
                     if (channel == 0) {
                       write_tail(out.message, channels, out.count, out.tail);
                     }
                   });
}

// A full chunk, as almost all are, needs no test for each vector.
enum class Chunk { kFull, kPartial };

// Merges the first `count` rows of a chunk of a matrix into `state`.
template <Chunk kChunk, typename T, int kVector, int kRows, typename A>
__device__ __forceinline__ void consume_rows(ChannelMoments<A, kVector>& state,
                                             const Vector<T, kVector> (&values)[kRows], int count,
                                             const A (&pivot)[kVector]) {
  ChannelMoments<A, kVector> chunk;
  chunk.count = count;
  const A reciprocal = 1 / chunk.count;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (kChunk == Chunk::kFull || k < count) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        chunk.mean[v] += values[k][v] - pivot[v];
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    chunk.mean[v] *= reciprocal;
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (kChunk == Chunk::kFull || k < count) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const A deviation = values[k][v] - pivot[v] - chunk.mean[v];
        chunk.m2[v] += deviation * deviation;
      }
    }
  }
  state.merge(chunk);
}

// Merges a chunk of a planar tensor into `state`; its vectors hold `count` values of the channel.
template <Chunk kChunk, bool kAligned, typename T, int kVector, typename A>
__device__ __forceinline__ void consume_vectors(ChannelMoments<A, 1>& state,
                                                const Vector<T, kVector> (&values)[kUnroll],
                                                const AlignedVector (&vector)[kUnroll], int count,
                                                A pivot) {
  ChannelMoments<A, 1> chunk;
  chunk.count = count;
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    A sum = 0;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (kChunk == Chunk::kFull || vector[k].template has<kAligned>(v)) {
        sum += values[k][v] - pivot;
      }
    }
    chunk.mean[0] += sum;
  }
  chunk.mean[0] /= chunk.count;
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    A m2 = 0;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (kChunk == Chunk::kFull || vector[k].template has<kAligned>(v)) {
        const A deviation = values[k][v] - pivot - chunk.mean[0];
        m2 += deviation * deviation;
      }
    }
    chunk.m2[0] += m2;
  }
  state.merge(chunk);
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    stats_matrix_kernel(Matrix matrix, const T* __restrict__ input, Output out) {
  using A = compute_t<T>;
  using State = ChannelMoments<A, kVector>;
  constexpr int kRows = rows_in_flight(sizeof(T) * kVector);
  auto& memory = shared_memory<ReductionMemory<A, State>>();

  const int64_t column = matrix.column<kVector>();
  const int rows = column < matrix.columns ? matrix.num_rows() : 0;
  const T* const first = input + matrix.first_row() * matrix.columns + column;
  A pivot[kVector] = {};
  if (kPivoted<T> && rows > 0) {
    const auto values = load<kVector, Reuse::kSoon>(first);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      pivot[v] = values[v];
    }
  }

  State state;
  const int step = blockDim.y;
  const int64_t stride = step * matrix.columns;
  const T* next = first + threadIdx.y * matrix.columns;
  for (int row = threadIdx.y; row < rows; row += kRows * step) {
    Vector<T, kVector> values[kRows];
    int loaded = 0;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (row + k * step < rows) {
        values[k] = load<kVector, Reuse::kSoon>(next);
        loaded = k + 1;
      }
      next += stride;
    }
    if (loaded == kRows) {
      consume_rows<Chunk::kFull>(state, values, loaded, pivot);
    } else {
      consume_rows<Chunk::kPartial>(state, values, loaded, pivot);
    }
  }

  double full_pivot[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    full_pivot[v] = pivot[v];
  }
  merge_moments<kPivoted<T>>(memory, state, full_pivot, threadIdx.y, blockDim.y, threadIdx.x,
                             blockDim.x);
  if (threadIdx.y == 0) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      put_sums(memory, matrix.tile_column<kVector>() + v, full_pivot[v], state.count, state.mean[v],
               state.m2[v]);
    }
  }
  finish_message(memory, matrix.channels, matrix.tile_channels, matrix.columns_of_channel, out);
}

template <typename T, int kVector, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    stats_planar_kernel(Planar planar, const T* __restrict__ input, Output out) {
  using A = compute_t<T>;
  using State = ChannelMoments<A, 1>;
  auto& memory = shared_memory<ReductionMemory<A, State>>();

  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int vectors = channel < planar.channels ? planar.num_vectors() : 0;
  A pivot = 0;
  if (kPivoted<T> && vectors > 0) {
    pivot = to_compute(input[planar.first_plane() + channel * planar.inner]);
  }

  State state;
  const int step = blockDim.x;
  VectorWalk<kVector, kAligned, Direction::kUp> walk(planar, channel,
                                                     planar.first_vector() + threadIdx.x);
  for (int at = threadIdx.x; at < vectors; at += kUnroll * step) {
    Vector<T, kVector> values[kUnroll];
    AlignedVector vector[kUnroll];
    int count = 0;
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      vector[k] = {};
      if (at + k * step < vectors) {
        vector[k] = walk.get();
        values[k] = load_vector<kVector, kAligned, Reuse::kSoon>(planar, input, vector[k]);
        count += __popc(vector[k].mask);
        walk.advance();
      }
    }
    if (count == 0) {
      continue;
    }
    if (kAligned && count == kUnroll * kVector) {
      consume_vectors<Chunk::kFull, kAligned>(state, values, vector, count, pivot);
    } else {
      consume_vectors<Chunk::kPartial, kAligned>(state, values, vector, count, pivot);
    }
  }

  double full_pivot[1] = {pivot};
  merge_moments<kPivoted<T>>(memory, state, full_pivot, threadIdx.x, blockDim.x, threadIdx.y,
                             blockDim.y);
  if (threadIdx.x == 0) {
    put_sums(memory, threadIdx.y, full_pivot[0], state.count, state.mean[0], state.m2[0]);
  }
  finish_message(memory, planar.channels, blockDim.y, /*terms=*/1, out);
}

}  // namespace

void launch_batch_norm_stats(const Plan& plan, void* stream, const void* input, double* message,
                             Tail tail, Workspace workspace) {
  const auto count = static_cast<double>(plan.geometry.per_channel());
  const Output out{message, count, tail, workspace};
  const dim3 grid(plan.tiles, plan.splits);
  const dim3 block(plan.block_x, plan.block_y);
  dispatch_plan(
      plan,
      [&](auto type, auto vector) {
        using T = typename decltype(type)::type;
        constexpr int kVector = vector;
        using Memory = ReductionMemory<compute_t<T>, ChannelMoments<compute_t<T>, kVector>>;
        launch(stats_matrix_kernel<T, kVector>, grid, block, sizeof(Memory),
               static_cast<cudaStream_t>(stream), Matrix(plan), static_cast<const T*>(input), out);
      },
      [&](auto type, auto vector, auto aligned) {
        using T = typename decltype(type)::type;
        constexpr int kVector = vector;
        using Memory = ReductionMemory<compute_t<T>, ChannelMoments<compute_t<T>, 1>>;
        launch(stats_planar_kernel<T, kVector, aligned>, grid, block, sizeof(Memory),
               static_cast<cudaStream_t>(stream), Planar(plan, input), static_cast<const T*>(input),
               out);
      });
}

}  // namespace syncbn::cuda
