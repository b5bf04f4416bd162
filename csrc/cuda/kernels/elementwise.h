// Element-wise kernels: a Formula of common/formulas.h computes each output value from the inputs'
// values at the same index. Each tensor is read or written once.
//
// One thread prepares each channel of a block: prepare.load(channel, first) issues all loads,
// derive(operands) waits for them, formula<A>(operands, derived) returns the constants. After the
// barrier finish<A>(operands, derived, channel) writes the channel's results, in the first of the
// channel's blocks. The kernel's argument is the formula without constants.
//
// The first loads are issued before the constants are computed, but after the loads of the
// operands.
#pragma once

#include "activations.h"
#include "device.h"
#include "dispatch.h"
#include "matrix.h"
#include "planar.h"
#include "tensors.h"

namespace syncbn::cuda {

// The constants of a block's channels in shared memory. Constants that threads read at once are
// neighbors.
template <typename Formula, typename A>
struct ConstantsMemory {
  A constants[Formula::kConstants][kMaxThreads];

  // `formula` is of doubles; its activation is not used.
  template <typename Constants>
  __device__ __forceinline__ void put(int channel, const Constants& formula) {
    static_assert(Constants::kConstants == Formula::kConstants);
    int i = 0;
    formula.map(
        [&](double constant) { return constants[i++][channel] = static_cast<A>(constant); });
  }
  __device__ __forceinline__ Formula get(int channel, const Formula& formula) const {
    int i = 0;
    return formula.map([&](A) { return constants[i++][channel]; });
  }
};

// Writes the constants of `channel`, the block's channel number `index`, if the thread `prepares`
// it; all threads issue their first loads before. All threads of the block call it.
template <typename A, typename Memory, typename Prepare, typename Load>
__device__ __forceinline__ void prepare_channel(Memory& memory, const Prepare& prepare,
                                                bool prepares, int index, int64_t channel,
                                                const Load& load_values) {
  const bool is_first = blockIdx.y == 0;
  typename Prepare::Operands operands;
  typename Prepare::Derived derived{};
  if (prepares) {
    operands = prepare.load(channel, is_first);
  }
  load_values();
  if (prepares) {
    derived = prepare.derive(operands);
    memory.put(index, prepare.template formula<A>(operands, derived));
  }
  __syncthreads();
  if (prepares && is_first) {
    prepare.template finish<A>(operands, derived, channel);
  }
}

template <typename T, int kVector, typename Formula>
SYNCBN_HOST_DEVICE constexpr int matrix_steps() {
  return steps_in_flight<Formula, compute_t<T>>(rows_in_flight(kElementwise, sizeof(T) * kVector));
}

// Unaligned vectors need more registers: with all loads, float32 would use local memory.
template <typename T, bool kAligned, typename Formula>
SYNCBN_HOST_DEVICE constexpr int planar_steps() {
  constexpr int kVectors = kElementwise.vectors;
  return steps_in_flight<Formula, compute_t<T>>(kAligned ? kVectors : 3 * kVectors / 4);
}

template <typename T, int kVector, typename Formula, typename Prepare>
__global__ void __launch_bounds__(kMaxThreads, kElementwise.blocks)
    elementwise_matrix_kernel(Matrix matrix, Tensors<T, Formula::kInputs> tensors, Prepare prepare,
                              Formula formula) {
  using A = compute_t<T>;
  constexpr int kInputs = Formula::kInputs;
  constexpr int kSteps = matrix_steps<T, kVector, Formula>();
  auto& memory = shared_memory<ConstantsMemory<Formula, A>>();

  const int64_t column = matrix.column<kVector>();
  ChunkWalk<kElementwise.direction> chunks(matrix.chunks, column < matrix.columns);
  const int row = threadIdx.y;
  const int step = blockDim.y;
  const int64_t stride = step * matrix.columns;
  int64_t offset = (chunks.first() + row) * matrix.columns + column;
  Vector<T, kVector> values[kInputs][kSteps];
  int left = chunks.left(row);
  const auto load_rows = [&] {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k * step < left) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          values[i][k] = load<kVector, Reuse::kNever>(tensors.input[i] + offset + k * stride);
        }
      }
    }
  };

  const int thread = thread_index();
  const int64_t prepared = blockIdx.x * matrix.tile_channels + thread;
  const bool prepares = thread < matrix.tile_channels && prepared < matrix.channels;
  prepare_channel<A>(memory, prepare, prepares, thread, prepared, load_rows);
  if (!chunks.has_chunk()) {
    return;  // also threads without a channel, whose constants nobody wrote
  }
  Formula formulas[kVector];
  matrix.for_each_column<kVector>(
      [&](int v, int channel) { formulas[v] = memory.get(channel, formula); });

  do {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k * step < left) {
        Vector<T, kVector> result;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          A in[kInputs];
#pragma unroll
          for (int i = 0; i < kInputs; ++i) {
            in[i] = values[i][k][v];
          }
          result.set(v, from_compute<T>(formulas[v](in)));
        }
        store(tensors.output + offset + k * stride, result);
      }
    }
    chunks.advance();
    left = chunks.left(row);
    offset -= matrix.stride;
    load_rows();
  } while (chunks.has_chunk());
}

template <typename T, int kVector, bool kAligned, typename Formula, typename Prepare>
__global__ void __launch_bounds__(kMaxThreads, kElementwise.blocks)
    elementwise_planar_kernel(Planar planar, Tensors<T, Formula::kInputs> tensors, Prepare prepare,
                              Formula formula) {
  using A = compute_t<T>;
  constexpr int kInputs = Formula::kInputs;
  constexpr int kSteps = planar_steps<T, kAligned, Formula>();
  auto& memory = shared_memory<ConstantsMemory<Formula, A>>();

  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  ChunkWalk<kElementwise.direction> chunks(planar.chunks, channel < planar.channels);
  const int at = threadIdx.x;
  const int step = blockDim.x;
  AlignedVector vector[kSteps];
  Vector<T, kVector> values[kInputs][kSteps];
  VectorWalk<kVector, kAligned, kElementwise.direction> walk(planar, channel, chunks.first() + at);
  int left = chunks.left(at);
  const auto load_vectors = [&] {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      vector[k] = walk.get();
      if (k * step < left) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          values[i][k] =
              load_vector<kVector, kAligned, Reuse::kNever>(planar, tensors.input[i], vector[k]);
        }
      }
      walk.advance();
    }
  };

  const bool prepares = threadIdx.x == 0 && channel < planar.channels;
  prepare_channel<A>(memory, prepare, prepares, threadIdx.y, channel, load_vectors);
  if (!chunks.has_chunk()) {
    return;  // also threads without a channel, whose constants nobody wrote
  }
  const Formula of_channel = memory.get(threadIdx.y, formula);

  do {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k * step < left) {
        Vector<T, kVector> result;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          A in[kInputs];
#pragma unroll
          for (int i = 0; i < kInputs; ++i) {
            in[i] = values[i][k][v];
          }
          result.set(v, from_compute<T>(of_channel(in)));
        }
        store_vector<kVector, kAligned>(tensors.output, vector[k], result);
      }
    }
    chunks.advance();
    left = chunks.left(at);
    walk.next_chunk();
    load_vectors();
  } while (chunks.has_chunk());
}

// Launches a formula over a plan; `inputs` and `output` have the plan's geometry and dtype.
// with_formula(TypeTag<T>{}, function) calls function(formula for tensors of T).
template <int kInputs, typename Prepare, typename WithFormula>
void launch_elementwise(const Plan& plan, void* stream, const void* const (&inputs)[kInputs],
                        void* output, const Prepare& prepare, const WithFormula& with_formula) {
  const dim3 grid(plan.tiles, plan.splits);
  const dim3 block(plan.block_x, plan.block_y);
  dispatch_plan(
      plan,
      [&](auto type, auto vector) {
        using T = typename decltype(type)::type;
        using A = compute_t<T>;
        constexpr int kVector = vector;
        with_formula(TypeTag<T>{}, [&](auto formula) {
          using Formula = decltype(formula);
          launch(elementwise_matrix_kernel<T, kVector, Formula, Prepare>, grid, block,
                 sizeof(ConstantsMemory<Formula, A>), static_cast<cudaStream_t>(stream),
                 Matrix(plan, matrix_steps<T, kVector, Formula>()), make_tensors<T>(inputs, output),
                 prepare, formula);
        });
      },
      [&](auto type, auto vector, auto aligned) {
        using T = typename decltype(type)::type;
        using A = compute_t<T>;
        constexpr bool kAligned = aligned;
        with_formula(TypeTag<T>{}, [&](auto formula) {
          using Formula = decltype(formula);
          launch(elementwise_planar_kernel<T, vector, kAligned, Formula, Prepare>, grid, block,
                 sizeof(ConstantsMemory<Formula, A>), static_cast<cudaStream_t>(stream),
                 Planar(plan, output, planar_steps<T, kAligned, Formula>()),
                 make_tensors<T>(inputs, output), prepare, formula);
        });
      });
}

}  // namespace syncbn::cuda
