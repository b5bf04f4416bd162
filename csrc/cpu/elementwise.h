// Element-wise work: reads one or two tensors and writes one of the same geometry, once each.
//
// What is computed is an Op<P>: a struct of kConstants packs of a channel's constants, whose
// operator() takes one pack of each of kInputs tensors and gives the output.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "cache.h"
#include "columns.h"
#include "pack.h"
#include "partition.h"

namespace syncbn::cpu {

// The widest row that is made of several short ones, in values.
constexpr int64_t kWidestRow = 2048;

template <template <typename> class Op, typename T>
struct Elementwise {
  using A = compute_t<T>;
  static constexpr int kInputs = Op<A>::kInputs;
  static constexpr int kConstants = Op<A>::kConstants;
  using Inputs = std::make_index_sequence<kInputs>;
  using Constants = std::make_index_sequence<kConstants>;

  std::array<const T*, kInputs> inputs;
  T* output;
  Geometry geometry;
  bool stream;
  int64_t width;       // of a row
  const A* constants;  // for planes [kConstants][channels], for rows [kConstants][lanes of a row]

  template <typename Isa>
  struct With {
    using P = Pack<A, Isa>;
    static constexpr int kSize = P::kSize;

    template <bool kStream, size_t... I>
    static SYNCBN_INLINE void compute(const Elementwise& job, const Op<P>& op, int64_t at,
                                      std::index_sequence<I...>) {
      store<T, Isa, kStream>(op(load<T, Isa>(job.inputs[I] + at)...), job.output + at);
    }

    // Reads ahead what compute() will need.
    template <bool kStream, size_t... I>
    static SYNCBN_INLINE void prefetch(const Elementwise& job, int64_t at,
                                       std::index_sequence<I...>) {
      (__builtin_prefetch(job.inputs[I] + at), ...);
      if constexpr (!kStream) {
        __builtin_prefetch(job.output + at, 1);
      }
    }

    // The `count` values before `end`, fewer than a pack.
    template <size_t... I>
    static SYNCBN_INLINE void compute_last(const Elementwise& job, const Op<P>& op, int64_t end,
                                           int64_t count, std::index_sequence<I...>) {
      store_last<T, Isa>(op(load_last<T, Isa>(job.inputs[I] + end, count)...), job.output + end,
                         count);
    }

    template <size_t... K>
    static SYNCBN_INLINE Op<P> of_channel(const Elementwise& job, int64_t channel,
                                          std::index_sequence<K...>) {
      return {P::broadcast(job.constants[K * job.geometry.channels + channel])...};
    }

    // Values of one channel, from `begin` to `end`. The last pack, and the first one before what
    // is streamed, may overlap their neighbors.
    template <bool kStream>
    static SYNCBN_INLINE void run_plane(const Elementwise& job, const Op<P>& op, int64_t begin,
                                        int64_t end) {
      if (end - begin < kSize) {
        return compute_last(job, op, end, end - begin, Inputs{});
      }
      int64_t at = begin;
      if constexpr (kStream) {
        // On to the next aligned address: what is skipped, less than a pack, has been written.
        constexpr size_t kAlignment = std::min<size_t>(kLine, kSize * sizeof(T));
        compute<false>(job, op, at, Inputs{});
        at += (-reinterpret_cast<size_t>(job.output + at) % kAlignment) / sizeof(T);
      }
      // At least a line at a time, which is what is read ahead.
      constexpr int kLinePacks = std::max<int>(kLine / (kSize * sizeof(T)), 1);
      for (; at + kLinePacks * kSize <= end; at += kLinePacks * kSize) {
        if constexpr (!kStream) {  // memory, a single stream, is fast enough by itself
          prefetch<kStream>(job, at + kPrefetchBytes / sizeof(T), Inputs{});
        }
        for (int i = 0; i < kLinePacks; ++i) {
          compute<kStream>(job, op, at + i * kSize, Inputs{});
        }
      }
      for (; at + kSize <= end; at += kSize) {
        compute<kStream>(job, op, at, Inputs{});
      }
      if (at < end) {
        compute<false>(job, op, end - kSize, Inputs{});
      }
    }

    template <bool kStream>
    static SYNCBN_INLINE void run_planes(const Elementwise& job, int64_t begin, int64_t end) {
      const int64_t inner = job.geometry.inner;
      int64_t channel = begin / inner % job.geometry.channels;
      int64_t plane_end = begin - begin % inner + inner;
      for (int64_t first = begin; first < end; first = plane_end, plane_end += inner) {
        run_plane<kStream>(job, of_channel(job, channel, Constants{}), first,
                           std::min(plane_end, end));
        channel = channel + 1 == job.geometry.channels ? 0 : channel + 1;
      }
    }

    template <size_t... K>
    static SYNCBN_INLINE Op<P> of_lanes(const Elementwise& job, int64_t lane, int64_t lanes,
                                        std::index_sequence<K...>) {
      return {P::read(job.constants + K * lanes + lane)...};
    }

    // Four rows are taken side by side, which read the constants once, but those after them are
    // read ahead one after another: memory is fastest that way.
    template <bool kStream>
    static SYNCBN_INLINE void run_rows(const Elementwise& job, int64_t begin, int64_t rows) {
      const Columns<T, Isa> columns{job.width};
      const int64_t lanes = columns.lanes();
      const int64_t ahead = round_up(kPrefetchBytes / sizeof(T), 4 * job.width);
      int64_t row = 0;
      for (; row + 4 <= rows && !columns.narrow(); row += 4) {
        const int64_t first = begin + row * job.width;
        for (int64_t lane = 0; lane < lanes; lane += kSize) {
          const Op<P> op = of_lanes(job, lane, lanes, Constants{});
          const int64_t at = first + std::min(lane, job.width - kSize);
          for (int i = 0; i < 4; ++i) {
            prefetch<kStream>(job, first + ahead + 4 * lane + i * kSize, Inputs{});
            compute<kStream>(job, op, at + i * job.width, Inputs{});
          }
        }
      }
      for (; row < rows; ++row) {
        const int64_t first = begin + row * job.width;
        if (columns.narrow()) {
          compute_last(job, of_lanes(job, 0, lanes, Constants{}), first + job.width, job.width,
                       Inputs{});
          continue;
        }
        for (int64_t lane = 0; lane < lanes; lane += kSize) {
          const int64_t at = first + std::min(lane, job.width - kSize);
          compute<kStream>(job, of_lanes(job, lane, lanes, Constants{}), at, Inputs{});
        }
      }
    }

    static SYNCBN_INLINE bool is_aligned(const Elementwise& job, int64_t at) {
      constexpr size_t kPackBytes = kSize * sizeof(T);
      return reinterpret_cast<size_t>(job.output + at) % kPackBytes == 0 &&
             job.width * sizeof(T) % kPackBytes == 0;
    }
  };

  // Values [begin, end) of planes.
  struct Planes {
    template <typename Isa>
    static SYNCBN_INLINE void run(const Elementwise* shared, int64_t begin, int64_t end) {
      const Elementwise job = *shared;  // which stores cannot change
      if (job.stream) {
        With<Isa>::template run_planes<true>(job, begin, end);
        finish_streaming();
      } else {
        With<Isa>::template run_planes<false>(job, begin, end);
      }
    }
  };

  // Lays out the constants of channels for planes, or for rows of `width` values.
  struct Layout {
    template <typename Isa>
    static SYNCBN_INLINE void run(const double* of_channels, const Geometry* geometry,
                                  int64_t width, A* constants) {
      const Columns<T, Isa> columns{width};
      const int64_t channels = geometry->channels;
      std::vector<double> repeated(width > channels ? width : 0);
      for (int k = 0; k < kConstants; ++k) {
        const double* row = of_channels + k * channels;
        if (!is_in_rows(*geometry)) {
          SYNCBN_INDEPENDENT
          for (int64_t c = 0; c < channels; ++c) {
            constants[k * channels + c] = to_constant<A>(row[c]);
          }
          continue;
        }
        if (width > channels) {
          for (int64_t column = 0; column < width;) {
            for (int64_t c = 0; c < channels; ++c) {
              for (int64_t i = 0; i < geometry->inner; ++i) {
                repeated[column++] = row[c];
              }
            }
          }
          row = repeated.data();
        }
        columns.for_each_lane([&](int64_t lane, int64_t column) {
          constants[k * columns.lanes() + lane] = to_constant<A>(row[column]);
        });
      }
    }
  };

  // Rows of `width` values, from value `begin` on.
  struct InRows {
    template <typename Isa>
    static SYNCBN_INLINE void run(const Elementwise* shared, int64_t begin, int64_t rows) {
      const Elementwise job = *shared;
      if (job.stream && With<Isa>::is_aligned(job, begin)) {
        With<Isa>::template run_rows<true>(job, begin, rows);
        finish_streaming();
      } else {
        With<Isa>::template run_rows<false>(job, begin, rows);
      }
    }
  };

  static SYNCBN_INLINE void finish_streaming() {
#if defined(__x86_64__)
    asm volatile("sfence" ::: "memory");
#endif
  }

  // of_channels: [kConstants][channels].
  void run_all(const double* of_channels) {
    const bool in_rows = is_in_rows(geometry);
    const int64_t row = geometry.channels * (in_rows ? geometry.inner : 1);
    const int64_t wide = in_rows ? rows_per_wide_row(row, kWidestRow) : 1;
    constexpr int64_t kLargestPack = 2 * Avx512::kVectorBytes / sizeof(A);
    // Vectors of constants must not straddle cache lines.
    std::vector<A> storage(kConstants * round_up(row * wide, kLargestPack) + kLine / sizeof(A));
    auto* const aligned =
        reinterpret_cast<A*>(round_up(reinterpret_cast<int64_t>(storage.data()), kLine));
    constants = aligned;
    const auto lay_out = [&](int64_t rows_in_one) {
      width = row * rows_in_one;
      cpu::run<Layout>(of_channels, &geometry, width, aligned);
    };
    if (!in_rows) {
      constexpr int64_t kPiece = 1024;
      const int64_t values = geometry.numel();
      lay_out(1);
      torch::stable::parallel_for(0, ceil_div(values, kPiece), kMinValuesPerThread / kPiece,
                                  [&](int64_t begin, int64_t end) {
                                    cpu::run<Planes>(this, begin * kPiece,
                                                     std::min(end * kPiece, values));
                                  });
      return;
    }
    const int64_t wide_rows = geometry.outer / wide;
    if (wide_rows > 0) {
      lay_out(wide);
      torch::stable::parallel_for(
          0, wide_rows, ceil_div(kMinValuesPerThread, width),
          [&](int64_t begin, int64_t end) { cpu::run<InRows>(this, begin * width, end - begin); });
    }
    if (const int64_t rest = geometry.outer - wide_rows * wide; rest > 0) {
      lay_out(1);
      cpu::run<InRows>(this, wide_rows * wide * row, rest);
    }
  }
};

// constants: [kConstants][channels].
template <template <typename> class Op, typename T, size_t kInputs>
void elementwise(const Geometry& geometry, const std::array<const T*, kInputs>& inputs, T* output,
                 const double* constants) {
  // What the last cache cannot hold is stored past it, which saves reading what is overwritten.
  const auto tensor_bytes = static_cast<int64_t>(geometry.numel() * sizeof(T));
  const bool stream = (int64_t{kInputs} + 1) * tensor_bytes > last_cache_bytes();
  Elementwise<Op, T>{inputs, output, geometry, stream, 0, nullptr}.run_all(constants);
}

}  // namespace syncbn::cpu
