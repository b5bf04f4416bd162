// Element-wise operators: a Formula of common/formulas.h computes each output value from the
// inputs' values at the same index. Each tensor is read or written once.
//
// Formula<double*> points to the constants of all channels, Formula<const A*> to the arrays that a
// loop reads, and Formula<Pack> computes.
#pragma once

#include <memory>
#include <vector>

#include "cache.h"
#include "masked_output.h"
#include "pages.h"
#include "plane_loop.h"
#include "row_loop.h"

namespace syncbn::cpu {

// The maximum number of values of a wide row, which consists of several short rows.
constexpr int64_t kWidestRow = 2048;

// Lays out a constant of all channels for PlaneLoop.
template <typename T>
struct LayOutForPlanes {
  template <typename Isa>
  static SYNCBN_INLINE void run(const double* of_channels, const Geometry* geometry,
                                compute_t<T>* constants) {
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < geometry->channels; ++c) {
      constants[c] = to_constant<compute_t<T>>(of_channels[c]);
    }
  }
};

// Lays out a constant of all channels for RowLoop: a value for each lane of a row of `width`
// columns. If a channel has several columns, `of_columns` is memory for `width` values.
template <typename T>
struct LayOutForRows {
  template <typename Isa>
  static SYNCBN_INLINE void run(const double* of_channels, const Geometry* geometry, int64_t width,
                                double* of_columns, compute_t<T>* constants) {
    if (width > geometry->channels) {
      double* end = of_columns;
      while (end < of_columns + width) {
        for (int64_t c = 0; c < geometry->channels; ++c) {
          end = std::fill_n(end, geometry->inner, of_channels[c]);
        }
      }
      of_channels = of_columns;
    }
    const Columns<T, Isa> columns{width};
    columns.for_each_lane([&](int64_t lane, int64_t column) {
      constants[lane] = to_constant<compute_t<T>>(of_channels[column]);
    });
  }
};

// Memory for the constants that a loop reads: arrays of up to `length` values.
template <template <typename> class Formula, typename A>
class ConstantArrays {
 public:
  explicit ConstantArrays(int64_t length)
      : length_(round_up(length, kLargestPack)), storage_(kNumber * length_ + kLine / sizeof(A)) {}

  // Calls lay_out(a constant of all channels, its array) for each constant of the formula.
  template <typename Function>
  Formula<const A*> fill(const Formula<double*>& of_channels, const Function& lay_out) {
    // Vectors of constants must not straddle cache lines.
    void* first = storage_.data();
    size_t num_bytes = storage_.size() * sizeof(A);
    auto* next = static_cast<A*>(std::align(kLine, 1, first, num_bytes));
    return of_channels.map([&](const double* values) -> const A* {
      A* const array = next;
      next += length_;
      lay_out(values, array);
      return array;
    });
  }

 private:
  static constexpr int64_t kNumber = Formula<A>::kConstants;
  static constexpr int64_t kLargestPack = 2 * Avx512::kVectorBytes / sizeof(A);

  int64_t length_;
  std::vector<A> storage_;
};

template <template <typename> class Formula, typename T>
void compute_in_planes(ElementwiseJob<Formula, T> job, const Geometry& geometry,
                       const uint8_t* mask, const Formula<double*>& constants) {
  ConstantArrays<Formula, compute_t<T>> arrays(geometry.channels);
  job.constants = arrays.fill(constants, [&](const double* of_channels, compute_t<T>* array) {
    dispatch_isa<LayOutForPlanes<T>>(of_channels, &geometry, array);
  });
  constexpr int64_t kUnit = 1024;  // threads begin at multiples of it
  const int64_t values = geometry.numel();
  const auto compute = [&](const ElementwiseJob<Formula, T>& part, int64_t at, int64_t count) {
    dispatch_isa<PlaneLoop<Formula, T>>(&part, &geometry, at, at + count);
  };
  const auto clear = [&](T* of_chunk, int64_t at, int64_t count) {
    dispatch_isa<ClearPlanes<T>>(of_chunk, mask, &geometry, at, count);
  };
  torch::stable::parallel_for(
      0, ceil_div(values, kUnit), kMinValuesPerThread / kUnit, [&](int64_t first, int64_t last) {
        const int64_t begin = first * kUnit;
        const int64_t end = std::min(last * kUnit, values);
        if (mask == nullptr) {
          compute(job, begin, end - begin);
        } else {
          compute_masked<Formula, T>(job, begin, end, kChunkValues, compute, clear);
        }
      });
}

template <template <typename> class Formula, typename T>
void compute_in_rows(ElementwiseJob<Formula, T> job, const Geometry& geometry, const uint8_t* mask,
                     const Formula<double*>& constants) {
  const int64_t row = geometry.channels * geometry.inner;
  const int64_t rows_in_wide = rows_per_wide_row(row, kWidestRow);
  const int64_t wide_row = row * rows_in_wide;
  const int64_t wide_rows = geometry.outer / rows_in_wide;
  ConstantArrays<Formula, compute_t<T>> arrays(wide_row);
  const auto lay_out = [&](int64_t width) {
    std::vector<double> of_columns(width > geometry.channels ? width : 0);
    job.constants = arrays.fill(constants, [&](const double* of_channels, compute_t<T>* array) {
      dispatch_isa<LayOutForRows<T>>(of_channels, &geometry, width, of_columns.data(), array);
    });
  };
  const auto compute_rows = [&](int64_t width, int64_t begin, int64_t rows) {
    const auto compute = [&](const ElementwiseJob<Formula, T>& part, int64_t at, int64_t count) {
      dispatch_isa<RowLoop<Formula, T>>(&part, width, at, count / width);
    };
    if (mask == nullptr) {
      compute(job, begin, rows * width);
      return;
    }
    std::vector<uint8_t> lanes(row);
    const auto clear = [&](T* values, int64_t at, int64_t count) {
      dispatch_isa<ClearRows<T>>(values, mask + at / geometry.channels, &geometry, count / row,
                                 lanes.data());
    };
    const int64_t chunk = std::max<int64_t>(kChunkValues / width, 1) * width;
    compute_masked<Formula, T>(job, begin, begin + rows * width, chunk, compute, clear);
  };
  if (wide_rows > 0) {
    lay_out(wide_row);
    torch::stable::parallel_for(
        0, wide_rows, ceil_div(kMinValuesPerThread, wide_row),
        [&](int64_t begin, int64_t end) { compute_rows(wide_row, begin * wide_row, end - begin); });
  }
  if (const int64_t rest = geometry.outer - wide_rows * rows_in_wide; rest > 0) {
    lay_out(row);
    compute_rows(row, wide_rows * wide_row, rest);
  }
}

template <template <typename> class Formula, typename T>
void elementwise(const Geometry& geometry, const uint8_t* mask,
                 const std::array<const T*, Formula<T>::kInputs>& inputs, T* output,
                 const Formula<double*>& constants) {
  const auto tensor_bytes = static_cast<int64_t>(geometry.numel() * sizeof(T));
  const bool is_new = prepare_output(output, tensor_bytes);
  // If the last-level cache cannot hold the tensors, the output bypasses the caches: that saves
  // reading the overwritten lines. Of a new page the system has just put them there.
  const bool stream = (int64_t{Formula<T>::kInputs} + 1) * tensor_bytes > last_cache_bytes() &&
                      reinterpret_cast<size_t>(output) % kLine == 0 && !is_new;
  const ElementwiseJob<Formula, T> job{inputs, output, {}, stream};
  if (is_in_rows(geometry)) {
    compute_in_rows(job, geometry, mask, constants);
  } else {
    compute_in_planes(job, geometry, mask, constants);
  }
}

}  // namespace syncbn::cpu
