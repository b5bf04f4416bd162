// batch_norm_backward_reduce on CUDA: reads dy and x once. If a residual was added before an
// activation, it also reads the residual or the output, and writes the residual's gradient.
//
// dz is dy or its product with the activation's derivative. Threads add up dz and
// dz * (x - center) in float32 (float64 inputs: in float64); center is the mean rounded to that
// type. Blocks are added up in float64, and the rest of the mean is taken into account:
// sum(dz * xhat) = (sum(dz * (x - center)) - (mean - center) * sum(dz)) * invstd.

#include "../../common/terms.h"
#include "activations.h"
#include "channel_vector.h"
#include "device.h"
#include "dispatch.h"
#include "launchers.h"
#include "matrix.h"
#include "planar.h"
#include "reduction.h"
#include "tensors.h"

namespace syncbn::cuda {
namespace {

template <typename A, int kChannels>
struct GradSums {
  A dz[kChannels] = {};
  A dz_deviation[kChannels] = {};

  __device__ __forceinline__ void merge(const GradSums& other) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      dz[c] += other.dz[c];
      dz_deviation[c] += other.dz_deviation[c];
    }
  }
};

template <typename A, int kVector>
using GradMemory = ColumnMemory<TwoSums, A, kVector>;

// Merges the sums of the block's threads to terms in memory. All threads of the block call it.
template <typename A, int kVector>
__device__ void merge_columns(GradMemory<A, kVector>& memory, const Matrix& matrix,
                              const GradSums<A, kVector>& state) {
  const int columns = blockDim.x * kVector;
  const int place = threadIdx.y * columns + matrix.tile_column<kVector>();
  put_columns(memory.first + place, state.dz);
  put_columns(memory.second + place, state.dz_deviation);
  StateWalk walk(matrix, columns);
  __syncthreads();
  A dz = 0;
  A dz_deviation = 0;
  while (walk.has_state()) {
    A first[kStates] = {};
    A second[kStates] = {};
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (walk.has_state()) {
        first[k] = memory.first[walk.place()];
        second[k] = memory.second[walk.place()];
        walk.advance();
      }
    }
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      dz += first[k];
      dz_deviation += second[k];
    }
  }
  if (walk.is_reader()) {
    memory.terms[walk.term()] = {dz, dz_deviation};
  }
}

// The same for the sums of each warp, whose threads have the same channel.
template <typename A>
__device__ void merge_warps(ReductionMemory<TwoSums>& memory, const GradSums<A, 1>& state) {
  const A dz = add_up_warp(state.dz[0]);
  const A dz_deviation = add_up_warp(state.dz_deviation[0]);
  if (threadIdx.x % kWarp == 0) {
    memory.terms[thread_index() / kWarp] = {dz, dz_deviation};
  }
}

struct GradOutputs {
  const double* mean;
  const double* invstd;
  const double* constants;  // [2C]: scale and shift of the forward pass, with an activation
  double* sums;
  Tail tail;
  ChannelVector grad_weight;
  ChannelVector grad_bias;
  Workspace workspace;
};

// Writes the sums; A is the type of the threads' sums.
template <typename A>
struct SumsOutput {
  const GradOutputs& out;
  int64_t channels;

  struct Loaded {
    double mean;
    double invstd;
  };
  __device__ __forceinline__ TwoSums to_sums(int /*channel*/, const TwoSums& sums) const {
    return sums;
  }
  __device__ __forceinline__ Loaded load(int64_t channel) const {
    return {out.mean[channel], out.invstd[channel]};
  }
  __device__ __forceinline__ void write(int64_t channel, const Loaded& loaded,
                                        const TwoSums& sums) const {
    const auto& [dz, dz_deviation] = sums;
    const double center = static_cast<A>(loaded.mean);
    const double dz_xhat = (dz_deviation - (loaded.mean - center) * dz) * loaded.invstd;
    out.sums[channel] = dz;
    out.sums[channels + channel] = dz_xhat;
    if (channel == 0 && out.tail.present) {
      write_tail(out.sums, channels, /*count=*/0, out.tail);
    }
    store_channel(out.grad_weight, channel, dz_xhat);
    store_channel(out.grad_bias, channel, dz);
  }
};

// The constants of a channel, loaded but not converted: a thread waits for them in get().
template <typename Formula>
struct LoadedConstants {
  double values[Formula::kConstants] = {};

  __device__ __forceinline__ void load(const GradOutputs& out, int64_t channels, int64_t channel) {
    values[0] = out.mean[channel];
    if constexpr (Formula::kConstants == 3) {
      values[1] = out.constants[channel];
      values[2] = out.constants[channels + channel];
    }
  }
  template <typename A>
  __device__ __forceinline__ Formula get(const Formula& formula) const {
    int i = 0;
    return formula.map([&](A) { return static_cast<A>(values[i++]); });
  }
};

template <typename T, int kVector, typename Formula>
SYNCBN_HOST_DEVICE constexpr int matrix_steps() {
  return steps_in_flight<Formula, compute_t<T>>(rows_in_flight(kReduction, sizeof(T) * kVector));
}

template <typename T, typename Formula>
SYNCBN_HOST_DEVICE constexpr int planar_steps() {
  return steps_in_flight<Formula, compute_t<T>>(kReduction.vectors);
}

template <typename T, int kVector, typename Formula>
__global__ void __launch_bounds__(kMaxThreads, kReduction.blocks)
    backward_reduce_matrix_kernel(Matrix matrix, Tensors<T, Formula::kInputs> tensors,
                                  GradOutputs out, Formula formula) {
  using A = compute_t<T>;
  using State = GradSums<A, kVector>;
  constexpr int kInputs = Formula::kInputs;
  constexpr int kSteps = matrix_steps<T, kVector, Formula>();
  auto& memory = shared_memory<GradMemory<A, kVector>>();

  const int64_t column = matrix.column<kVector>();
  ChunkWalk<kReduction.direction> chunks(matrix.chunks, column < matrix.columns);
  const int row = threadIdx.y;
  const int step = blockDim.y;
  const int64_t stride = step * matrix.columns;
  int64_t offset = (chunks.first() + row) * matrix.columns + column;
  Vector<T, kVector> values[kInputs][kSteps];
  const auto load_rows = [&] {
    const int left = chunks.left(row);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k * step < left) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          // If the weights are stored, the next pass reads them in place of dy.
          const T* const from = tensors.input[i] + offset + k * stride;
          values[i][k] = Formula::kStores && i != 1 ? load<kVector, Reuse::kNever>(from)
                                                    : load<kVector, Reuse::kSoon>(from);
        }
      }
    }
  };
  // Threads wait for the constants after they have issued the loads of the first rows.
  LoadedConstants<Formula> loaded[kVector];
  matrix.for_each_column<kVector>([&](int v, int channel) {
    if (chunks.has_chunk()) {
      loaded[v].load(out, matrix.channels, blockIdx.x * matrix.tile_channels + channel);
    }
  });
  load_rows();
  Formula formulas[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    formulas[v] = loaded[v].template get<A>(formula);
  }

  State state;
  while (chunks.has_chunk()) {
    const int left = chunks.left(row);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k * step < left) {
        Vector<T, kVector> stored;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          A in[kInputs];
#pragma unroll
          for (int i = 0; i < kInputs; ++i) {
            in[i] = values[i][k][v];
          }
          const Term<A> term = formulas[v](in);
          state.dz[v] += term.weight;
          state.dz_deviation[v] += term.weight * term.deviation;
          if constexpr (Formula::kStores) {
            stored.set(v, from_compute<T>(term.weight));
          }
        }
        if constexpr (Formula::kStores) {
          store(tensors.output + offset + k * stride, stored);
        }
      }
    }
    chunks.advance();
    offset += matrix.stride;
    load_rows();
  }

  merge_columns(memory, matrix, state);
  finish_reduction(memory, matrix.channels, matrix.tile_channels, matrix.readers, out.workspace,
                   SumsOutput<A>{out, matrix.channels});
}

template <typename T, int kVector, bool kAligned, typename Formula>
__global__ void __launch_bounds__(kMaxThreads, kReduction.blocks)
    backward_reduce_planar_kernel(Planar planar, Tensors<T, Formula::kInputs> tensors,
                                  GradOutputs out, Formula formula) {
  using A = compute_t<T>;
  using State = GradSums<A, 1>;
  constexpr int kInputs = Formula::kInputs;
  constexpr int kSteps = planar_steps<T, Formula>();
  auto& memory = shared_memory<ReductionMemory<TwoSums>>();

  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  ChunkWalk<kReduction.direction> chunks(planar.chunks, channel < planar.channels);
  const int at = threadIdx.x;
  const int step = blockDim.x;
  Vector<T, kVector> values[kInputs][kSteps];
  AlignedVector vector[kSteps];
  VectorWalk<kVector, kAligned, kReduction.direction> walk(planar, channel, chunks.first() + at);
  const auto load_vectors = [&] {
    const int left = chunks.left(at);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      vector[k] = {};
      if (k * step < left) {
        vector[k] = walk.get();
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          const T* const from = tensors.input[i];
          values[i][k] =
              Formula::kStores && i != 1
                  ? load_vector<kVector, kAligned, Reuse::kNever>(planar, from, vector[k])
                  : load_vector<kVector, kAligned, Reuse::kSoon>(planar, from, vector[k]);
        }
      }
      walk.advance();
    }
  };
  // Threads wait for the constants after they have issued the loads of the first vectors.
  LoadedConstants<Formula> loaded;
  if (chunks.has_chunk()) {
    loaded.load(out, planar.channels, channel);
  }
  load_vectors();
  const Formula of_channel = loaded.template get<A>(formula);

  State state;
  while (chunks.has_chunk()) {
    const int left = chunks.left(at);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      State chunk;
      Vector<T, kVector> stored{};
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        if (vector[k].template has<kAligned>(v)) {
          A in[kInputs];
#pragma unroll
          for (int i = 0; i < kInputs; ++i) {
            in[i] = values[i][k][v];
          }
          const Term<A> term = of_channel(in);
          chunk.dz[0] += term.weight;
          chunk.dz_deviation[0] += term.weight * term.deviation;
          if constexpr (Formula::kStores) {
            stored.set(v, from_compute<T>(term.weight));
          }
        }
      }
      state.merge(chunk);
      if constexpr (Formula::kStores) {
        if (k * step < left) {
          store_vector<kVector, kAligned>(tensors.output, vector[k], stored);
        }
      }
    }
    chunks.advance();
    walk.next_chunk();
    load_vectors();
  }

  merge_warps(memory, state);
  finish_reduction(memory, planar.channels, blockDim.y, blockDim.x / kWarp, out.workspace,
                   SumsOutput<A>{out, planar.channels});
}

template <int kInputs, typename WithFormula>
void launch_reduction(const Plan& plan, void* stream, const void* const (&inputs)[kInputs],
                      void* output, const GradOutputs& out, const WithFormula& with_formula) {
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
          launch(backward_reduce_matrix_kernel<T, kVector, Formula>, grid, block,
                 sizeof(GradMemory<A, kVector>), static_cast<cudaStream_t>(stream),
                 Matrix(plan, matrix_steps<T, kVector, Formula>()), make_tensors<T>(inputs, output),
                 out, formula);
        });
      },
      [&](auto type, auto vector, auto aligned) {
        using T = typename decltype(type)::type;
        with_formula(TypeTag<T>{}, [&](auto formula) {
          using Formula = decltype(formula);
          launch(backward_reduce_planar_kernel<T, vector, aligned, Formula>, grid, block,
                 sizeof(ReductionMemory<TwoSums>), static_cast<cudaStream_t>(stream),
                 Planar(plan, inputs[1], planar_steps<T, Formula>()),
                 make_tensors<T>(inputs, output), out, formula);
        });
      });
}

}  // namespace

void launch_batch_norm_backward_reduce(const Plan& plan, void* stream, const void* grad_output,
                                       const void* input, const double* mean, const double* invstd,
                                       double* sums, Tail tail, ChannelVector grad_weight,
                                       ChannelVector grad_bias, Workspace workspace,
                                       EpilogueGradient epilogue) {
  const GradOutputs out{mean, invstd,      epilogue.constants, sums,
                        tail, grad_weight, grad_bias,          workspace};
  if (epilogue.activation.kind == Activation::kNone) {
    launch_reduction(plan, stream, {grad_output, input}, nullptr, out,
                     [](auto type, const auto& function) {
                       function(GradTerms<compute_t<typename decltype(type)::type>>{});
                     });
  } else if (epilogue.residual != nullptr) {
    launch_reduction(
        plan, stream, {grad_output, input, epilogue.residual}, epilogue.dz, out,
        [&](auto type, const auto& function) {
          using T = typename decltype(type)::type;
          dispatch_activation<T>(epilogue.activation, plan.dtype, [&](auto activation) {
            using Act = decltype(activation);
            if constexpr (!Act::kFromOutput) {
              using Terms = GradTermsWithEpilogue<Act, true>;
              function(typename Terms::template Formula<compute_t<T>>{{}, {}, {}, activation});
            }
          });
        });
  } else if (epilogue.output != nullptr) {
    launch_reduction(plan, stream, {grad_output, input, epilogue.output}, epilogue.dz, out,
                     [&](auto type, const auto& function) {
                       using A = compute_t<typename decltype(type)::type>;
                       const auto activation =
                           make_piecewise_linear<A>(epilogue.activation, plan.dtype);
                       using Terms = GradTermsFromOutput<PiecewiseLinear<A>>;
                       function(typename Terms::template Formula<A>{{}, activation});
                     });
  } else {
    launch_reduction(
        plan, stream, {grad_output, input}, nullptr, out, [&](auto type, const auto& function) {
          using T = typename decltype(type)::type;
          dispatch_activation<T>(epilogue.activation, plan.dtype, [&](auto activation) {
            using Terms = GradTermsWithEpilogue<decltype(activation), false>;
            function(typename Terms::template Formula<compute_t<T>>{{}, {}, {}, activation});
          });
        });
  }
}

}  // namespace syncbn::cuda
