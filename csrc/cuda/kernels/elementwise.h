// Kernels that compute each value from those at the same place and from constants of its channel.
//
// Op has kInputs, kConstants, and apply() from kInputs values to one. prepare.constants<A>(channel,
// first) gives the constants of a channel; one thread for each channel of a block calls it, `first`
// being true in one block. Reads each input and writes the output once.
//
// A block goes downwards through its segment, whose end the reduction before it has read last: what
// is still in the L2 cache comes first. Its first loads are on their way while it prepares.
#pragma once

#include "device.h"
#include "dispatch.h"
#include "matrix.h"
#include "planar.h"

namespace syncbn::cuda {

template <int kConstants>
struct Constants {
  double values[kConstants];
};

template <typename T, typename Op>
struct Tensors {
  const T* input[Op::kInputs];
  T* output;
};

template <typename A, typename Op>
struct ConstantsMemory {
  A constants[Op::kConstants][kMaxThreads];
};

template <typename T, int kVector, typename Op, typename Prepare>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    elementwise_matrix_kernel(Matrix matrix, Tensors<T, Op> tensors, Prepare prepare) {
  using A = compute_t<T>;
  constexpr int kSteps = kUnroll / Op::kInputs;
  auto& memory = shared_memory<ConstantsMemory<A, Op>>();

  const int64_t channel = matrix.channel<kVector>();
  const int rows = channel < matrix.channels ? matrix.num_rows() : 0;
  const int step = blockDim.y;
  const int64_t stride = step * matrix.channels;
  int row = rows - 1 - static_cast<int>(threadIdx.y);
  int64_t offset = (matrix.first_row() + row) * matrix.channels + channel;
  Vector<T, kVector> values[Op::kInputs][kSteps];
  const auto load_rows = [&]() {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (row - k * step >= 0) {
#pragma unroll
        for (int i = 0; i < Op::kInputs; ++i) {
          values[i][k] = load<kVector, Reuse::kNever>(tensors.input[i] + offset - k * stride);
        }
      }
    }
  };
  load_rows();

  const int64_t first_channel = blockIdx.x * matrix.tile_channels;
  const int thread = thread_index();
  if (thread < matrix.tile_channels && first_channel + thread < matrix.channels) {
    const auto constants = prepare.template constants<A>(first_channel + thread, blockIdx.y == 0);
#pragma unroll
    for (int i = 0; i < Op::kConstants; ++i) {
      memory.constants[i][thread] = static_cast<A>(constants.values[i]);
    }
  }
  __syncthreads();
  A constants[Op::kConstants][kVector];
#pragma unroll
  for (int i = 0; i < Op::kConstants; ++i) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      constants[i][v] = memory.constants[i][threadIdx.x * kVector + v];
    }
  }

  while (row >= 0) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (row - k * step >= 0) {
        Vector<T, kVector> result;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          A in[Op::kInputs];
          A channel_constants[Op::kConstants];
#pragma unroll
          for (int i = 0; i < Op::kInputs; ++i) {
            in[i] = values[i][k][v];
          }
#pragma unroll
          for (int i = 0; i < Op::kConstants; ++i) {
            channel_constants[i] = constants[i][v];
          }
          result.set(v, from_compute<T>(Op::apply(in, channel_constants)));
        }
        store(tensors.output + offset - k * stride, result);
      }
    }
    row -= kSteps * step;
    offset -= kSteps * stride;
    load_rows();
  }
}

template <typename T, int kVector, bool kAligned, typename Op, typename Prepare>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    elementwise_planar_kernel(Planar planar, Tensors<T, Op> tensors, Prepare prepare) {
  using A = compute_t<T>;
  constexpr int kSteps = kUnroll / Op::kInputs;
  auto& memory = shared_memory<ConstantsMemory<A, Op>>();

  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int slots = channel < planar.channels ? planar.num_slots() : 0;
  const int step = blockDim.x;
  int at = slots - 1 - static_cast<int>(threadIdx.x);
  Slot slot[kSteps];
  Vector<T, kVector> values[Op::kInputs][kSteps];
  SlotWalk<kVector, kAligned, Direction::kDown> walk(planar, channel,
                                                     planar.first_slot() + (at < 0 ? 0 : at));
  const auto load_slots = [&]() {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (at - k * step >= 0) {
        slot[k] = walk.get();
        walk.advance();
#pragma unroll
        for (int i = 0; i < Op::kInputs; ++i) {
          values[i][k] =
              load_slot<kVector, kAligned, Reuse::kNever>(planar, tensors.input[i], slot[k]);
        }
      }
    }
  };
  load_slots();

  if (threadIdx.x == 0 && channel < planar.channels) {
    const auto constants = prepare.template constants<A>(channel, blockIdx.y == 0);
#pragma unroll
    for (int i = 0; i < Op::kConstants; ++i) {
      memory.constants[i][threadIdx.y] = static_cast<A>(constants.values[i]);
    }
  }
  __syncthreads();
  A constants[Op::kConstants];
#pragma unroll
  for (int i = 0; i < Op::kConstants; ++i) {
    constants[i] = memory.constants[i][threadIdx.y];
  }

  while (at >= 0) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (at - k * step >= 0) {
        Vector<T, kVector> result;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          A in[Op::kInputs];
#pragma unroll
          for (int i = 0; i < Op::kInputs; ++i) {
            in[i] = values[i][k][v];
          }
          result.set(v, from_compute<T>(Op::apply(in, constants)));
        }
        store_slot<kVector, kAligned>(tensors.output, slot[k], result);
      }
    }
    at -= kSteps * step;
    load_slots();
  }
}

// Launches Op over a plan; `inputs` and `output` have the plan's geometry and dtype.
template <typename Op, typename Prepare>
void launch_elementwise(const Plan& plan, void* stream, const void* const (&inputs)[Op::kInputs],
                        void* output, const Prepare& prepare) {
  const dim3 grid(plan.tiles, plan.splits);
  const dim3 block(plan.block_x, plan.block_y);
  const auto typed = [&](auto type) {
    using T = typename decltype(type)::type;
    Tensors<T, Op> tensors;
    for (int i = 0; i < Op::kInputs; ++i) {
      tensors.input[i] = static_cast<const T*>(inputs[i]);
    }
    tensors.output = static_cast<T*>(output);
    return tensors;
  };
  dispatch_plan(
      plan,
      [&](auto type, auto vector) {
        using T = typename decltype(type)::type;
        launch(elementwise_matrix_kernel<T, vector, Op, Prepare>, grid, block,
               sizeof(ConstantsMemory<compute_t<T>, Op>), static_cast<cudaStream_t>(stream),
               Matrix(plan), typed(type), prepare);
      },
      [&](auto type, auto vector, auto aligned) {
        using T = typename decltype(type)::type;
        launch(elementwise_planar_kernel<T, vector, aligned, Op, Prepare>, grid, block,
               sizeof(ConstantsMemory<compute_t<T>, Op>), static_cast<cudaStream_t>(stream),
               Planar(plan, output), typed(type), prepare);
      });
}

}  // namespace syncbn::cuda
