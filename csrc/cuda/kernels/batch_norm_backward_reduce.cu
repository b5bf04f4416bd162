// batch_norm_backward_reduce on CUDA. Reads dy and x once.
//
// Threads add up dy and dy * (x - center) in float32, for float64 inputs in float64, with center
// the mean rounded to that type; blocks are added up in float64, where the rest of the mean is
// taken into account: sum(dy * xhat) = (sum(dy * (x - center)) - (mean - center) * sum(dy)) *
// invstd.

#include "channel_vector.h"
#include "device.h"
#include "dispatch.h"
#include "matrix.h"
#include "operators.h"
#include "planar.h"
#include "reduction.h"

namespace syncbn::cuda {
namespace {

template <typename A, int kChannels>
struct GradSums {
  A dy[kChannels] = {};
  A dy_deviation[kChannels] = {};

  __device__ __forceinline__ void merge(const GradSums& other) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      dy[c] += other.dy[c];
      dy_deviation[c] += other.dy_deviation[c];
    }
  }
};

struct GradOutputs {
  const double* mean;
  const double* invstd;
  double* sums;
  Announcement announcement;
  ChannelVector grad_weight;
  ChannelVector grad_bias;
  Workspace workspace;
};

template <typename A, typename Memory>
__device__ void finish_sums(Memory& memory, int64_t channels, int64_t tile_channels, int terms,
                            const GradOutputs& out) {
  finish_reduction(memory, channels, tile_channels, terms, out.workspace,
                   [&](int64_t channel, const TwoSums& sums) {
                     const auto& [dy, dy_deviation] = sums;
                     const double center = static_cast<A>(out.mean[channel]);
                     const double dy_xhat =
                         (dy_deviation - (out.mean[channel] - center) * dy) * out.invstd[channel];
                     out.sums[channel] = dy;
                     out.sums[channels + channel] = dy_xhat;
                     if (channel == 0 && out.announcement.present) {
                       write_end(out.sums, channels, /*count=*/0, out.announcement);
                     }
                     store_channel(out.grad_weight, channel, dy_xhat);
                     store_channel(out.grad_bias, channel, dy);
                   });
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    backward_reduce_matrix_kernel(Matrix matrix, const T* __restrict__ grad_output,
                                  const T* __restrict__ input, GradOutputs out) {
  using A = compute_t<T>;
  using State = GradSums<A, kVector>;
  constexpr int kPairs = rows_in_flight(sizeof(T) * kVector) / 2;
  auto& memory = shared_memory<ReductionMemory<A, State>>();

  const int64_t column = matrix.column<kVector>();
  const int rows = column < matrix.columns ? matrix.num_rows() : 0;
  const int step = blockDim.y;
  const int64_t stride = step * matrix.columns;
  int row = threadIdx.y;
  int64_t next = (matrix.first_row() + row) * matrix.columns + column;
  Vector<T, kVector> dy[kPairs];
  Vector<T, kVector> x[kPairs];
  const auto load_rows = [&]() {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (row + k * step < rows) {
        dy[k] = load<kVector, Reuse::kSoon>(grad_output + next);
        x[k] = load<kVector, Reuse::kSoon>(input + next);
      }
      next += stride;
    }
  };
  // The means are waited for behind the first rows.
  double mean[kVector];
  matrix.for_each_column<kVector>([&](int v, int channel) {
    mean[v] = rows > 0 ? out.mean[blockIdx.x * matrix.tile_channels + channel] : 0;
  });
  load_rows();
  A center[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    center[v] = static_cast<A>(mean[v]);
  }

  State state;
  while (row < rows) {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (row + k * step < rows) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          state.dy[v] += dy[k][v];
          state.dy_deviation[v] += dy[k][v] * (x[k][v] - center[v]);
        }
      }
    }
    row += kPairs * step;
    load_rows();
  }

  merge_members(memory, state, threadIdx.y, blockDim.y, threadIdx.x, blockDim.x);
  if (threadIdx.y == 0) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      memory.terms[matrix.tile_column<kVector>() + v] = {state.dy[v], state.dy_deviation[v]};
    }
  }
  finish_sums<A>(memory, matrix.channels, matrix.tile_channels, matrix.columns_of_channel, out);
}

template <typename T, int kVector, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    backward_reduce_planar_kernel(Planar planar, const T* __restrict__ grad_output,
                                  const T* __restrict__ input, GradOutputs out) {
  using A = compute_t<T>;
  using State = GradSums<A, 1>;
  constexpr int kPairs = kUnroll / 2;
  auto& memory = shared_memory<ReductionMemory<A, State>>();

  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int slots = channel < planar.channels ? planar.num_slots() : 0;
  const int step = blockDim.x;
  int at = threadIdx.x;
  Vector<T, kVector> dy[kPairs];
  Vector<T, kVector> x[kPairs];
  Slot slot[kPairs];
  SlotWalk<kVector, kAligned, Direction::kUp> walk(planar, channel, planar.first_slot() + at);
  const auto load_slots = [&]() {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      slot[k] = {};
      if (at + k * step < slots) {
        slot[k] = walk.get();
        dy[k] = load_slot<kVector, kAligned, Reuse::kSoon>(planar, grad_output, slot[k]);
        x[k] = load_slot<kVector, kAligned, Reuse::kSoon>(planar, input, slot[k]);
        walk.advance();
      }
    }
  };
  // The mean is waited for behind the first slots.
  const double mean = slots > 0 ? out.mean[channel] : 0;
  load_slots();
  const A center = static_cast<A>(mean);

  State state;
  while (at < slots) {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      State chunk;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        if (slot[k].template has<kAligned>(v)) {
          chunk.dy[0] += dy[k][v];
          chunk.dy_deviation[0] += dy[k][v] * (x[k][v] - center);
        }
      }
      state.merge(chunk);
    }
    at += kPairs * step;
    load_slots();
  }

  merge_members(memory, state, threadIdx.x, blockDim.x, threadIdx.y, blockDim.y);
  if (threadIdx.x == 0) {
    memory.terms[threadIdx.y] = {state.dy[0], state.dy_deviation[0]};
  }
  finish_sums<A>(memory, planar.channels, blockDim.y, /*terms=*/1, out);
}

}  // namespace

void launch_batch_norm_backward_reduce(const Plan& plan, void* stream, const void* grad_output,
                                       const void* input, const double* mean, const double* invstd,
                                       double* sums, Announcement announcement,
                                       ChannelVector grad_weight, ChannelVector grad_bias,
                                       Workspace workspace) {
  const dim3 grid(plan.tiles, plan.splits);
  const dim3 block(plan.block_x, plan.block_y);
  const GradOutputs out{mean, invstd, sums, announcement, grad_weight, grad_bias, workspace};
  dispatch_plan(
      plan,
      [&](auto type, auto vector) {
        using T = typename decltype(type)::type;
        using A = compute_t<T>;
        constexpr int kVector = vector;
        launch(backward_reduce_matrix_kernel<T, kVector>, grid, block,
               sizeof(ReductionMemory<A, GradSums<A, kVector>>), static_cast<cudaStream_t>(stream),
               Matrix(plan), static_cast<const T*>(grad_output), static_cast<const T*>(input), out);
      },
      [&](auto type, auto vector, auto aligned) {
        using T = typename decltype(type)::type;
        using A = compute_t<T>;
        launch(backward_reduce_planar_kernel<T, vector, aligned>, grid, block,
               sizeof(ReductionMemory<A, GradSums<A, 1>>), static_cast<cudaStream_t>(stream),
               Planar(plan, input), static_cast<const T*>(grad_output),
               static_cast<const T*>(input), out);
      });
}

}  // namespace syncbn::cuda
