// Two sums over a task's values of each channel: the sum of the weights of common/terms.h, and the
// sum of the products of weight and deviation. Each input is read once.
//
// Each lane has compensated sums (Kahan), as accurate as sums in double without conversions. The
// packs of a group are added up without compensation before they enter a sum: the remaining error.
#pragma once

#include <array>

#include "../common/terms.h"
#include "columns.h"
#include "pack.h"
#include "partition.h"

namespace syncbn::cpu {

// Packs or rows that are added up without compensation; a power of two.
constexpr int kGroup = 8;

// Kahan summation of V, a pack or a vector.
template <typename V>
struct CompensatedSum {
  V sum;
  V lost;

  SYNCBN_INLINE void add(const V& x) {
    const V corrected = x - lost;
    const V total = sum + corrected;
    lost = (total - sum) - corrected;
    sum = total;
  }
};

// The tensors of a sum, with one geometry: the formula's inputs and, if the formula stores weights,
// their output.
template <template <typename> class Formula, typename T>
struct SummedTensors {
  static constexpr int kInputs = Formula<T>::kInputs;

  std::array<const T*, kInputs> inputs;
  T* output = nullptr;

  SYNCBN_INLINE SummedTensors from(int64_t offset) const {
    SummedTensors tensors = *this;
    for (const T*& input : tensors.inputs) {
      input += offset;
    }
    if constexpr (Formula<T>::kStores) {
      tensors.output += offset;
    }
    return tensors;
  }
};

// The lanes' sums over some packs.
template <template <typename> class Formula, typename T, typename Isa>
struct PackSums {
  using P = Pack<compute_t<T>, Isa>;
  using Tensors = SummedTensors<Formula, T>;
  static constexpr int kInputs = Tensors::kInputs;

  P weights;
  P products;

  static SYNCBN_INLINE PackSums zero() { return {P::zero(), P::zero()}; }
  static SYNCBN_INLINE PackSums of(const Term<P>& term) {
    return {term.weight, term.weight * term.deviation};
  }
  static SYNCBN_INLINE PackSums load_pack(const Tensors& tensors, const Formula<P>& formula,
                                          int64_t at) {
    P values[kInputs];
    for (int i = 0; i < kInputs; ++i) {
      values[i] = load<T, Isa>(tensors.inputs[i] + at);
    }
    const Term<P> term = formula(values);
    if constexpr (Formula<T>::kStores) {
      store<T, Isa>(term.weight, tensors.output + at);
    }
    return of(term);
  }
  // The last `count` values before `end`, fewer than a pack. With `overlaps` a full pack before
  // `end` can be read; the weights of its first values are stored already.
  static SYNCBN_INLINE PackSums load_last_pack(const Tensors& tensors, const Formula<P>& formula,
                                               int64_t end, int64_t count, bool overlaps) {
    P values[kInputs];
    for (int i = 0; i < kInputs; ++i) {
      const T* const input = tensors.inputs[i] + end;
      values[i] = overlaps ? load<T, Isa>(input - P::kSize) : load_last<T, Isa>(input, count);
    }
    const Term<P> term = formula(values);
    if constexpr (Formula<T>::kStores) {
      store_last<T, Isa>(term.weight, tensors.output + end, count);
    }
    if constexpr (kInputs == 1) {  // the weight is the deviation
      const P deviation = keep_last<T, Isa>(term.deviation, count);
      return of({deviation, deviation});
    }
    return of({keep_last<T, Isa>(term.weight, count), keep_last<T, Isa>(term.deviation, count)});
  }
  // Packs at distances of `stride`.
  template <int kPacks>
  static SYNCBN_INLINE PackSums load_packs(const Tensors& tensors, const Formula<P>& formula,
                                           int64_t at, int64_t stride) {
    if constexpr (kPacks == 1) {
      return load_pack(tensors, formula, at);
    } else if constexpr (Formula<T>::kIsLong) {
      PackSums sum = zero();
      for (int i = 0; i < kPacks; ++i) {
        sum.add(load_pack(tensors, formula, at + i * stride));
      }
      return sum;
    } else {
      constexpr int kHalf = kPacks / 2;
      PackSums sum = load_packs<kHalf>(tensors, formula, at, stride);
      sum.add(load_packs<kHalf>(tensors, formula, at + kHalf * stride, stride));
      return sum;
    }
  }
  SYNCBN_INLINE void add(const PackSums& other) {
    weights = weights + other.weights;
    products = products + other.products;
  }
};

// Sums one channel of planes; `constants` are the channel's.
template <template <typename> class Formula, typename T, typename Isa>
SYNCBN_INLINE void planar_sums(const SummedTensors<Formula, T>& tensors, const Geometry& geometry,
                               const Task& task, const Formula<compute_t<T>>& constants,
                               double& weights, double& products) {
  using P = Pack<compute_t<T>, Isa>;
  using Packs = PackSums<Formula, T, Isa>;
  constexpr int kSize = P::kSize;
  const auto formula = constants.map(
      [](compute_t<T> constant) __attribute__((always_inline)) { return P::broadcast(constant); });
  // Each short plane begins a stream, which processors do not prefetch. Measured on Zen 3: then
  // prefetching the next plane is fastest.
  constexpr int64_t kShortPlaneBytes = 2048;
  const bool is_short = geometry.inner * static_cast<int64_t>(sizeof(T)) <= kShortPlaneBytes;
  CompensatedSum<typename P::Vector> weight_sum{}, product_sum{};
  Spans spans(geometry, task.channel, task.begin, task.length);
  const auto prefetch_next_plane = [&](int64_t at) __attribute__((always_inline)) {
    for (const T* input : tensors.inputs) {
      prefetch_pack<P, Ahead::kAllLines>(input + at + spans.channel_stride);
    }
  };
  for (; spans.left > 0; spans.next()) {
    const int64_t n = spans.length();
    const int64_t end = spans.offset + n;
    int64_t at = spans.offset;
    for (; at + kGroup * kSize <= end; at += kGroup * kSize) {
      if (is_short) {
        for (int i = 0; i < kGroup; ++i) {
          prefetch_next_plane(at + i * kSize);
        }
      } else if constexpr (Isa::kVectorBytes < kLine && Formula<T>::kInputs == 1) {
        // Measured: prefetching helps a single stream, unless a vector is a whole line.
        constexpr int64_t kAhead = 2 * kPrefetchBytes / sizeof(T);
        for (int i = 0; i < kGroup; ++i) {
          prefetch_pack<P, Ahead::kAllLines>(tensors.inputs[0] + at + kAhead + i * kSize);
        }
      }
      const Packs group = Packs::template load_packs<kGroup>(tensors, formula, at, kSize);
      weight_sum.add(group.weights.low + group.weights.high);
      product_sum.add(group.products.low + group.products.high);
    }
    if (at == end) {
      continue;
    }
    Packs rest = Packs::zero();
    for (; at + kSize <= end; at += kSize) {
      if (is_short) {
        prefetch_next_plane(at);
      }
      rest.add(Packs::load_pack(tensors, formula, at));
    }
    if (at < end) {
      rest.add(Packs::load_last_pack(tensors, formula, end, end - at, /*overlaps=*/n >= kSize));
    }
    weight_sum.add(rest.weights.low + rest.weights.high);
    product_sum.add(rest.products.low + rest.products.high);
  }
  weights = 0;
  products = 0;
  for (int lane = 0; lane < kSize / 2; ++lane) {
    weights += static_cast<double>(weight_sum.sum[lane]) - weight_sum.lost[lane];
    products += static_cast<double>(product_sum.sum[lane]) - product_sum.lost[lane];
  }
}

// Sums each column of rows at distances of `stride`, at most kMaxColumns columns. Constants and
// sums are arrays over columns; sums are overwritten.
template <template <typename> class Formula, typename T, typename Isa>
SYNCBN_INLINE void column_sums(const SummedTensors<Formula, T>& tensors, int64_t stride,
                               int64_t rows, int64_t width,
                               const Formula<const compute_t<T>*>& column_constants,
                               double* weights, double* products) {
  using A = compute_t<T>;
  using P = Pack<A, Isa>;
  using Packs = PackSums<Formula, T, Isa>;
  constexpr int kSize = P::kSize;
  const Columns<T, Isa> columns{width};
  const int64_t lanes = columns.lanes();
  // A line more than columns: lines at distances of 4 KB share a set of L1.
  constexpr int64_t kRow = kMaxColumns + kLine / sizeof(A);
  alignas(64) A constants[Formula<A>::kConstants][kRow];
  alignas(64) A sums[4][kRow];
  int number = 0;
  const auto lane_constants = column_constants.map([&](const A* of_columns) -> const A* {
    A* const of_lanes = constants[number++];
    columns.for_each_lane(
        [&](int64_t lane, int64_t column) { of_lanes[lane] = of_columns[column]; });
    return of_lanes;
  });
  const auto formula_of_lanes = [&](int64_t lane) __attribute__((always_inline)) {
    return lane_constants.map(
        [&](const A* of_lanes) __attribute__((always_inline)) { return P::read(of_lanes + lane); });
  };
  for (auto& sum : sums) {
    std::fill(sum, sum + lanes, static_cast<A>(0));
  }
  const auto add = [&](int64_t lane, const Packs& group) __attribute__((always_inline)) {
    CompensatedSum<P> weight_sum{P::read(sums[0] + lane), P::read(sums[1] + lane)};
    CompensatedSum<P> product_sum{P::read(sums[2] + lane), P::read(sums[3] + lane)};
    weight_sum.add(group.weights);
    product_sum.add(group.products);
    weight_sum.sum.write(sums[0] + lane);
    weight_sum.lost.write(sums[1] + lane);
    product_sum.sum.write(sums[2] + lane);
    product_sum.lost.write(sums[3] + lane);
  };
  const int64_t groups = columns.narrow() ? 0 : rows / kGroup;
  if constexpr (Formula<T>::kStores) {
    // Measured: stores that do not follow the order of memory take twice as long.
    alignas(64) A group_sums[2][kRow];
    for (int64_t row = 0; row < groups * kGroup; ++row) {
      for (int64_t lane = 0; lane < lanes; lane += kSize) {
        const int64_t at = row * stride + std::min(lane, width - kSize);
        Packs group = Packs::load_pack(tensors, formula_of_lanes(lane), at);
        if (row % kGroup > 0) {
          group.add({P::read(group_sums[0] + lane), P::read(group_sums[1] + lane)});
        }
        if (row % kGroup < kGroup - 1) {
          group.weights.write(group_sums[0] + lane);
          group.products.write(group_sums[1] + lane);
        } else {
          add(lane, group);
        }
      }
    }
  } else {
    // Rows are read as kGroup streams, each in the order of memory: processors prefetch streams.
    // Measured: neighboring rows side by side take up to twice as long.
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t lane = 0; lane < lanes; lane += kSize) {
        const int64_t at = group * stride + std::min(lane, width - kSize);
        add(lane, Packs::template load_packs<kGroup>(tensors, formula_of_lanes(lane), at,
                                                     groups * stride));
      }
    }
  }
  for (int64_t row = groups * kGroup; row < rows; ++row) {
    if (columns.narrow()) {
      const int64_t end = row * stride + width;
      add(0, Packs::load_last_pack(tensors, formula_of_lanes(0), end, width, /*overlaps=*/false));
      continue;
    }
    for (int64_t pack = 0; pack < columns.packs(); ++pack) {
      const int64_t lane = pack * kSize;
      add(lane,
          Packs::load_pack(tensors, formula_of_lanes(lane), row * stride + columns.first(pack)));
    }
  }
  columns.for_each_lane([&](int64_t lane, int64_t column) {
    weights[column] = static_cast<double>(sums[0][lane]) - static_cast<double>(sums[1][lane]);
    products[column] = static_cast<double>(sums[2][lane]) - static_cast<double>(sums[3][lane]);
  });
}

// Sums the channels of a task of rows. Constants and sums are arrays over the task's channels; sums
// are overwritten.
template <template <typename> class Formula, typename T, typename Isa>
SYNCBN_INLINE void row_sums(const SummedTensors<Formula, T>& tensors, const Geometry& geometry,
                            const Task& task, const Formula<const compute_t<T>*>& constants,
                            double* weights, double* products) {
  using A = compute_t<T>;
  const int64_t inner = geometry.inner;
  const int64_t stride = geometry.channels * inner;
  const int64_t width = task.channels * inner;
  const int64_t first = task.begin * stride + task.channel * inner;
  const int64_t wide = width == stride ? rows_per_wide_row(width, kColumns) : 1;
  const bool columns_are_channels = inner == 1 && wide == 1;
  if (!columns_are_channels) {
    std::fill(weights, weights + task.channels, 0);
    std::fill(products, products + task.channels, 0);
  }
  A column_constants[Formula<A>::kConstants][kMaxColumns];
  double column_weights[kMaxColumns];
  double column_products[kMaxColumns];
  // Wide rows, then the remaining rows. One call in a loop, because it is inlined.
  int64_t rows_in_one = wide;
  for (int64_t done = 0; done < task.length; rows_in_one = 1) {
    const int64_t rows = (task.length - done) / rows_in_one;
    const int64_t at = first + done * stride;
    done += rows * rows_in_one;
    const auto for_each_column = [&](const auto& function) {
      int64_t column = 0;
      for (int64_t row = 0; row < rows_in_one; ++row) {
        for (int64_t c = 0; c < task.channels; ++c) {
          for (int64_t i = 0; i < inner; ++i) {
            function(column++, c);
          }
        }
      }
    };
    int number = 0;
    const auto of_columns = constants.map([&](const A* of_channels) -> const A* {
      if (columns_are_channels) {
        return of_channels;
      }
      A* const values = column_constants[number++];
      for_each_column([&](int64_t column, int64_t c) { values[column] = of_channels[c]; });
      return values;
    });
    column_sums<Formula, T, Isa>(tensors.from(at), stride * rows_in_one, rows, width * rows_in_one,
                                 of_columns, columns_are_channels ? weights : column_weights,
                                 columns_are_channels ? products : column_products);
    if (!columns_are_channels) {
      for_each_column([&](int64_t column, int64_t c) {
        weights[c] += column_weights[column];
        products[c] += column_products[column];
      });
    }
  }
}

// The kernels of both sums. Constants are arrays over all channels.

template <template <typename> class Formula, typename T>
struct PlanarSums {
  using A = compute_t<T>;

  template <typename Isa>
  static SYNCBN_INLINE void run(const SummedTensors<Formula, T>* shared, const Geometry* geometry,
                                const Task* task, const Formula<const A*>* constants,
                                double* weight, double* product) {
    const SummedTensors<Formula, T> tensors = *shared;  // which stores cannot change
    const auto formula = constants->map([&](const A* values) { return values[task->channel]; });
    planar_sums<Formula, T, Isa>(tensors, *geometry, *task, formula, *weight, *product);
  }
};

template <template <typename> class Formula, typename T>
struct RowSums {
  using A = compute_t<T>;

  template <typename Isa>
  static SYNCBN_INLINE void run(const SummedTensors<Formula, T>* shared, const Geometry* geometry,
                                const Task* task, const Formula<const A*>* constants,
                                double* weights, double* products) {
    const SummedTensors<Formula, T> tensors = *shared;  // which stores cannot change
    const auto of_task = constants->map([&](const A* values) { return values + task->channel; });
    row_sums<Formula, T, Isa>(tensors, *geometry, *task, of_task, weights, products);
  }
};

}  // namespace syncbn::cpu
