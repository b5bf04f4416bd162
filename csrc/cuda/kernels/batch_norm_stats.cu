// batch_norm_stats on CUDA: reads the input once.
//
// A thread loads chunks of 8 or 16 vectors into registers and computes from each its mean, then its
// squared deviations from the mean: as robust as Welford's method, without a division for each
// value. Chunks are merged exactly in float (csrc/common/moments.h has the formula), then the
// states of a warp, or of about eight threads of a matrix, at once. From there on sums of
// deviations, and then of values, are added up in float64.
//
// Floats cannot hold the mean of values far from zero. So all threads of a channel or column first
// subtract one of its values, the pivot. Values of 16 bits need no pivot: their own rounding is
// coarser.

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
    if (count == 0) {
      *this = other;
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

// Sums over some values of a channel: their number, their deviations from the base and the squares
// of these. The base is the mean of a few of the values: closer to all of them than zero is.
struct DeviationSums {
  double count = 0;
  double deviations = 0;
  double squares = 0;

  __device__ __forceinline__ void add(const DeviationSums& other) {
    count += other.count;
    deviations += other.deviations;
    squares += other.squares;
  }
  // The sums of the thread `lanes` further in the warp.
  __device__ __forceinline__ DeviationSums shuffle_down(int lanes) const {
    return {__shfl_down_sync(kAllLanes, count, lanes),
            __shfl_down_sync(kAllLanes, deviations, lanes),
            __shfl_down_sync(kAllLanes, squares, lanes)};
  }
};

// The sums over `count` values; `mean` is relative to the base, `m2` the sum of their squared
// deviations from the mean.
template <typename A>
__device__ __forceinline__ DeviationSums to_deviation_sums(A count, double mean, A m2) {
  const double sum = static_cast<double>(count) * mean;
  return {static_cast<double>(count), sum, static_cast<double>(m2) + sum * mean};
}

// The sums over the values of several states, whose means are relative to the base. `rest` corrects
// the rounding of the mean: a float is less exact than the mean of many floats.
template <typename A, int kNumber>
__device__ __forceinline__ DeviationSums add_up_states(const Moments<A> (&states)[kNumber]) {
  A count = 0;
  A sum = 0;
#pragma unroll
  for (const Moments<A>& state : states) {
    count += state.count;
    sum += state.count * state.mean;
  }
  if (count == 0) {
    return {};
  }
  const A mean = sum / count;
  A m2 = 0;
  A rest = 0;
#pragma unroll
  for (const Moments<A>& state : states) {
    const A deviation = state.mean - mean;
    const A weighted = state.count * deviation;
    rest += weighted;
    m2 += state.m2 + weighted * deviation;
  }
  return to_deviation_sums(count, static_cast<double>(mean) + static_cast<double>(rest / count),
                           m2);
}

template <typename T, int kVector>
struct StatsMemory : ColumnMemory<DeviationSums, compute_t<T>, kVector> {
  double bases[kMaxThreads];                                                 // [channel]
  compute_t<T> counts[kMaxThreads];                                          // [member][vector]
  alignas(16) compute_t<T> pivots[kPivoted<T> ? kVector * kMaxThreads : 1];  // [column]
};

template <typename T>
struct PlanarStatsMemory : ReductionMemory<DeviationSums> {
  double bases[kMaxThreads / kWarp];        // [channel]
  compute_t<T> means[kMaxThreads / kWarp];  // [channel], of the first thread
};

// Returns the base of a channel, relative to the pivot of its first column.
template <typename T, int kVector>
__device__ __forceinline__ compute_t<T> find_base(const StatsMemory<T, kVector>& memory,
                                                  unsigned first_column, unsigned columns) {
  if constexpr (!std::is_same_v<T, double>) {
    return memory.first[first_column];
  } else {
    // In a small tensor a thread has one value. If it is far from the others, the sums in float64
    // lose a digit.
    double sum = 0;
    int number = 0;
    for (unsigned member = 0; member < kStates && member < blockDim.y; ++member) {
      const unsigned place = member * columns + first_column;
      if (memory.counts[place / kVector] > 0) {
        sum += memory.first[place];
        ++number;
      }
    }
    return number == 0 ? 0 : sum / number;
  }
}

// Merges the moments of the block's threads to terms in memory. All threads of the block call it.
template <typename T, int kVector, typename A>
__device__ void merge_columns(StatsMemory<T, kVector>& memory, const Matrix& matrix,
                              const ChannelMoments<A, kVector>& state, const A (&pivot)[kVector]) {
  const int columns = blockDim.x * kVector;
  const int column = matrix.tile_column<kVector>();
  put_columns(memory.first + threadIdx.y * columns + column, state.mean);
  put_columns(memory.second + threadIdx.y * columns + column, state.m2);
  memory.counts[thread_index()] = state.count;
  if (kPivoted<T> && threadIdx.y == 0) {
    put_columns(memory.pivots + column, pivot);
  }
  StateWalk walk(matrix, columns);
  __syncthreads();
  const A channel_pivot = kPivoted<T> ? memory.pivots[walk.first_column()] : A{0};
  const A base = find_base<T, kVector>(memory, walk.first_column(), columns);
  DeviationSums sums;
  while (walk.has_state()) {
    Moments<A> states[kStates];
    A pivots[kStates] = {};
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (walk.has_state()) {
        states[k].count = memory.counts[walk.place() / kVector];
        states[k].mean = memory.first[walk.place()];
        states[k].m2 = memory.second[walk.place()];
        if (kPivoted<T>) {
          pivots[k] = memory.pivots[walk.column()];
        }
        walk.advance();
      }
    }
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (states[k].count > 0) {
        states[k].mean = (pivots[k] - channel_pivot) + (states[k].mean - base);
      }
    }
    sums.add(add_up_states(states));
  }
  if (walk.is_reader()) {
    memory.terms[walk.term()] = sums;
  }
  const int thread = thread_index();
  if (thread < matrix.tile_channels) {  // the first reader of a channel
    memory.bases[thread] = static_cast<double>(channel_pivot) + static_cast<double>(base);
  }
}

// Merges the moments of each warp, whose threads have the same channel, to a term in memory. All
// threads of the block call it.
template <typename A, typename T>
__device__ void merge_warps(PlanarStatsMemory<T>& memory, const ChannelMoments<A, 1>& state,
                            A pivot) {
  if (threadIdx.x == 0) {
    memory.bases[threadIdx.y] = static_cast<double>(pivot) + static_cast<double>(state.mean[0]);
    memory.means[threadIdx.y] = state.mean[0];
  }
  __syncthreads();
  const A deviation = state.mean[0] - memory.means[threadIdx.y];
  const A count = add_up_warp(state.count);
  const A sum = add_up_warp(state.count * deviation);
  const A mean = count > 0 ? sum / count : 0;
  const A weighted = state.count * (deviation - mean);
  const A rest = add_up_warp(weighted);
  const A m2 = add_up_warp(state.m2[0] + weighted * (deviation - mean));
  if (threadIdx.x % kWarp == 0) {
    DeviationSums sums;
    if (count > 0) {
      sums = to_deviation_sums(count, static_cast<double>(mean) + static_cast<double>(rest / count),
                               m2);
    }
    memory.terms[thread_index() / kWarp] = sums;
  }
}

struct Output {
  double* message;
  int64_t channels;
  double count;
  Tail tail;
  Workspace workspace;
};

// Writes the message; the bases are of the tile's channels.
struct MessageOutput {
  const Output& out;
  const double* bases;

  __device__ __forceinline__ TwoSums to_sums(int channel, const DeviationSums& sums) const {
    if (sums.count == 0) {
      return {};
    }
    const double mean = sums.deviations / sums.count;
    const Sums result =
        syncbn::to_sums({sums.count, bases[channel] + mean, sums.squares - sums.deviations * mean});
    return {result.values, result.squares};
  }
  struct Nothing {};
  __device__ __forceinline__ Nothing load(int64_t /*channel*/) const { return {}; }
  __device__ __forceinline__ void write(int64_t channel, Nothing, const TwoSums& sums) const {
    out.message[channel] = sums.first;
    out.message[out.channels + channel] = sums.second;
    if (channel == 0) {
      write_tail(out.message, out.channels, out.count, out.tail);
    }
  }
};

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
    const A sum = chunk.mean[v];
    chunk.mean[v] *= reciprocal;
    if (kChunk == Chunk::kPartial) {  // a rounded reciprocal; equal values must have no variance
      chunk.mean[v] =
          std::fma(std::fma(-chunk.mean[v], chunk.count, sum), reciprocal, chunk.mean[v]);
    }
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
__device__ __forceinline__ void consume_vectors(
    ChannelMoments<A, 1>& state, const Vector<T, kVector> (&values)[kReduction.vectors],
    const AlignedVector (&vector)[kReduction.vectors], int count, A pivot) {
  ChannelMoments<A, 1> chunk;
  chunk.count = count;
#pragma unroll
  for (int k = 0; k < kReduction.vectors; ++k) {
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
  for (int k = 0; k < kReduction.vectors; ++k) {
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
__global__ void __launch_bounds__(kMaxThreads, kReduction.blocks)
    stats_matrix_kernel(Matrix matrix, const T* __restrict__ input, Output out) {
  using A = compute_t<T>;
  using State = ChannelMoments<A, kVector>;
  constexpr int kRows = rows_in_flight(kReduction, sizeof(T) * kVector);
  auto& memory = shared_memory<StatsMemory<T, kVector>>();

  const int64_t column = matrix.column<kVector>();
  ChunkWalk<kReduction.direction> chunks(matrix.chunks, column < matrix.columns);
  const T* next = input + chunks.first() * matrix.columns + column;
  A pivot[kVector] = {};
  if (kPivoted<T> && chunks.has_chunk()) {
    const auto values = load<kVector, Reuse::kSoon>(next);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      pivot[v] = values[v];
    }
  }

  State state;
  const int row = threadIdx.y;
  const int step = blockDim.y;
  const int64_t stride = step * matrix.columns;
  next += row * matrix.columns;
  for (; chunks.has_chunk(); chunks.advance(), next += matrix.stride) {
    const int left = chunks.left(row);
    Vector<T, kVector> values[kRows];
    int loaded = 0;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (k * step < left) {
        values[k] = load<kVector, Reuse::kSoon>(next + k * stride);
        loaded = k + 1;
      }
    }
    if (loaded == kRows) {
      consume_rows<Chunk::kFull>(state, values, loaded, pivot);
    } else if (loaded > 0) {
      consume_rows<Chunk::kPartial>(state, values, loaded, pivot);
    }
  }

  merge_columns(memory, matrix, state, pivot);
  finish_reduction(memory, matrix.channels, matrix.tile_channels, matrix.readers, out.workspace,
                   MessageOutput{out, memory.bases});
}

template <typename T, int kVector, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, kReduction.blocks)
    stats_planar_kernel(Planar planar, const T* __restrict__ input, Output out) {
  using A = compute_t<T>;
  using State = ChannelMoments<A, 1>;
  auto& memory = shared_memory<PlanarStatsMemory<T>>();

  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  ChunkWalk<kReduction.direction> chunks(planar.chunks, channel < planar.channels);
  A pivot = 0;
  if (kPivoted<T> && chunks.has_chunk()) {
    const int64_t plane = chunks.first() / planar.vectors_in_plane;
    pivot = to_compute(input[plane * planar.plane_stride + channel * planar.inner]);
  }

  State state;
  const int at = threadIdx.x;
  const int step = blockDim.x;
  VectorWalk<kVector, kAligned, kReduction.direction> walk(planar, channel, chunks.first() + at);
  for (; chunks.has_chunk(); chunks.advance(), walk.next_chunk()) {
    const int left = chunks.left(at);
    Vector<T, kVector> values[kReduction.vectors];
    AlignedVector vector[kReduction.vectors];
    int count = 0;
#pragma unroll
    for (int k = 0; k < kReduction.vectors; ++k) {
      vector[k] = {};
      if (k * step < left) {
        vector[k] = walk.get();
        values[k] = load_vector<kVector, kAligned, Reuse::kSoon>(planar, input, vector[k]);
        count += __popc(vector[k].mask);
      }
      walk.advance();
    }
    if (count == 0) {
      continue;
    }
    if (kAligned && count == kReduction.vectors * kVector) {
      consume_vectors<Chunk::kFull, kAligned>(state, values, vector, count, pivot);
    } else {
      consume_vectors<Chunk::kPartial, kAligned>(state, values, vector, count, pivot);
    }
  }

  merge_warps(memory, state, pivot);
  finish_reduction(memory, planar.channels, blockDim.y, blockDim.x / kWarp, out.workspace,
                   MessageOutput{out, memory.bases});
}

}  // namespace

void launch_batch_norm_stats(const Plan& plan, void* stream, const void* input, double* message,
                             Tail tail, Workspace workspace) {
  const auto count = static_cast<double>(plan.geometry.per_channel());
  const Output out{message, plan.geometry.channels, count, tail, workspace};
  const dim3 grid(plan.tiles, plan.splits);
  const dim3 block(plan.block_x, plan.block_y);
  dispatch_plan(
      plan,
      [&](auto type, auto vector) {
        using T = typename decltype(type)::type;
        constexpr int kVector = vector;
        launch(stats_matrix_kernel<T, kVector>, grid, block, sizeof(StatsMemory<T, kVector>),
               static_cast<cudaStream_t>(stream),
               Matrix(plan, rows_in_flight(kReduction, sizeof(T) * kVector)),
               static_cast<const T*>(input), out);
      },
      [&](auto type, auto vector, auto aligned) {
        using T = typename decltype(type)::type;
        launch(stats_planar_kernel<T, vector, aligned>, grid, block, sizeof(PlanarStatsMemory<T>),
               static_cast<cudaStream_t>(stream), Planar(plan, input, kReduction.vectors),
               static_cast<const T*>(input), out);
      });
}

}  // namespace syncbn::cuda
