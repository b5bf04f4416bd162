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

template <typename A, typename Memory>
__device__ void finish_sums(Memory& memory, int64_t channels, int64_t tile_channels, int terms,
                            const GradOutputs& out) {
  finish_reduction(memory, channels, tile_channels, terms, out.workspace,
                   [&](int64_t channel, const TwoSums& sums) {
                     const auto& [dz, dz_deviation] = sums;
                     const double center = static_cast<A>(out.mean[channel]);
                     const double dz_xhat =
                         (dz_deviation - (out.mean[channel] - center) * dz) * out.invstd[channel];
                     out.sums[channel] = dz;
                     out.sums[channels + channel] = dz_xhat;
                     if (channel == 0 && out.tail.present) {
                       write_tail(out.sums, channels, /*count=*/0, out.tail);
                     }
                     store_channel(out.grad_weight, channel, dz_xhat);
                     store_channel(out.grad_bias, channel, dz);
                   });
}

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
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    backward_reduce_matrix_kernel(Matrix matrix, Tensors<T, Formula::kInputs> tensors,
                                  GradOutputs out, Formula formula) {
  using A = compute_t<T>;
  using State = GradSums<A, kVector>;
  constexpr int kInputs = Formula::kInputs;
  constexpr int kSteps = steps_in_flight<Formula, A>(rows_in_flight(sizeof(T) * kVector));
  auto& memory = shared_memory<ReductionMemory<A, State>>();

  const int64_t column = matrix.column<kVector>();
  const int rows = column < matrix.columns ? matrix.num_rows() : 0;
  const int step = blockDim.y;
  const int64_t stride = step * matrix.columns;
  int row = threadIdx.y;
  int64_t next = (matrix.first_row() + row) * matrix.columns + column;
  Vector<T, kVector> values[kInputs][kSteps];
  const auto load_rows = [&]() {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (row + k * step < rows) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          // If the weights are stored, the next pass reads them in place of dy.
          const T* const from = tensors.input[i] + next;
          values[i][k] = Formula::kStores && i != 1 ? load<kVector, Reuse::kNever>(from)
                                                    : load<kVector, Reuse::kSoon>(from);
        }
      }
      next += stride;
    }
  };
  // Threads wait for the constants after they have issued the loads of the first rows.
  LoadedConstants<Formula> loaded[kVector];
  matrix.for_each_column<kVector>([&](int v, int channel) {
    if (rows > 0) {
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
  while (row < rows) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (row + k * step < rows) {
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
          store(tensors.output + next - (kSteps - k) * stride, stored);
        }
      }
    }
    row += kSteps * step;
    load_rows();
  }

  merge_members(memory, state, threadIdx.y, blockDim.y, threadIdx.x, blockDim.x);
  if (threadIdx.y == 0) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      memory.terms[matrix.tile_column<kVector>() + v] = {state.dz[v], state.dz_deviation[v]};
    }
  }
  finish_sums<A>(memory, matrix.channels, matrix.tile_channels, matrix.columns_of_channel, out);
}

template <typename T, int kVector, bool kAligned, typename Formula>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    backward_reduce_planar_kernel(Planar planar, Tensors<T, Formula::kInputs> tensors,
                                  GradOutputs out, Formula formula) {
  using A = compute_t<T>;
  using State = GradSums<A, 1>;
  constexpr int kInputs = Formula::kInputs;
  constexpr int kSteps = steps_in_flight<Formula, A>(kUnroll);
  auto& memory = shared_memory<ReductionMemory<A, State>>();

  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int vectors = channel < planar.channels ? planar.num_vectors() : 0;
  const int step = blockDim.x;
  int at = threadIdx.x;
  Vector<T, kVector> values[kInputs][kSteps];
  AlignedVector vector[kSteps];
  VectorWalk<kVector, kAligned, Direction::kUp> walk(planar, channel, planar.first_vector() + at);
  const auto load_vectors = [&]() {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      vector[k] = {};
      if (at + k * step < vectors) {
        vector[k] = walk.get();
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          const T* const from = tensors.input[i];
          values[i][k] =
              Formula::kStores && i != 1
                  ? load_vector<kVector, kAligned, Reuse::kNever>(planar, from, vector[k])
                  : load_vector<kVector, kAligned, Reuse::kSoon>(planar, from, vector[k]);
        }
        walk.advance();
      }
    }
  };
  // Threads wait for the constants after they have issued the loads of the first vectors.
  LoadedConstants<Formula> loaded;
  if (vectors > 0) {
    loaded.load(out, planar.channels, channel);
  }
  load_vectors();
  const Formula of_channel = loaded.template get<A>(formula);

  State state;
  while (at < vectors) {
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
        if (at + k * step < vectors) {
          store_vector<kVector, kAligned>(tensors.output, vector[k], stored);
        }
      }
    }
    at += kSteps * step;
    load_vectors();
  }

  merge_members(memory, state, threadIdx.x, blockDim.x, threadIdx.y, blockDim.y);
  if (threadIdx.x == 0) {
    memory.terms[threadIdx.y] = {state.dz[0], state.dz_deviation[0]};
  }
  finish_sums<A>(memory, planar.channels, blockDim.y, /*terms=*/1, out);
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
          launch(backward_reduce_matrix_kernel<T, kVector, decltype(formula)>, grid, block,
                 sizeof(ReductionMemory<A, GradSums<A, kVector>>),
                 static_cast<cudaStream_t>(stream), Matrix(plan), make_tensors<T>(inputs, output),
                 out, formula);
        });
      },
      [&](auto type, auto vector, auto aligned) {
        using T = typename decltype(type)::type;
        using A = compute_t<T>;
        with_formula(TypeTag<T>{}, [&](auto formula) {
          launch(backward_reduce_planar_kernel<T, vector, aligned, decltype(formula)>, grid, block,
                 sizeof(ReductionMemory<A, GradSums<A, 1>>), static_cast<cudaStream_t>(stream),
                 Planar(plan, inputs[1]), make_tensors<T>(inputs, output), out, formula);
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
  } else if (epilogue.residual != nullptr) {  // SiLU
    launch_reduction(plan, stream, {grad_output, input, epilogue.residual}, epilogue.dz, out,
                     [](auto type, const auto& function) {
                       using T = typename decltype(type)::type;
                       using Terms = GradTermsWithEpilogue<SiluFor<T>, true>;
                       function(typename Terms::template Formula<compute_t<T>>{});
                     });
  } else if (epilogue.output != nullptr) {  // ReLU and leaky ReLU
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
