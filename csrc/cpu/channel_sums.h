// Two sums over an item's values of each channel: of w, and of w * (x - center). In the backward
// pass w is dy; for the statistics, where there is no dy, it is x - center itself, and the pointer
// to dy is not used.
//
// Every lane has sums of its own, which carry what rounding took from them (Kahan): as accurate as
// double without the conversions. A group of packs is added up before it goes into a sum, without
// a carry, which is the error that remains. Reads its input once.
#pragma once

#include "columns.h"
#include "pack.h"
#include "partition.h"

namespace syncbn::cpu {

// Packs or rows that are added up without a carry; a power of two.
constexpr int kGroup = 8;

// The distance at which planes are read ahead, measured: the statistics, which read a single
// stream, get half of the bandwidth of memory without; two streams from memory get less if it is
// further.
template <bool kWithGrad>
constexpr int64_t kAheadBytes = kWithGrad ? 1024 : 4096;

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

// The sums of some packs.
template <typename T, typename Isa, bool kWithGrad>
struct Terms {
  using P = Pack<compute_t<T>, Isa>;

  P weights;
  P products;

  static SYNCBN_INLINE Terms of(const P& dy, const P& deviation) {
    const P weight = kWithGrad ? dy : deviation;
    return {weight, weight * deviation};
  }
  static SYNCBN_INLINE Terms load_pack(const T* dy, const T* x, const P& center) {
    const P deviation = load<T, Isa>(x) - center;
    return of(kWithGrad ? load<T, Isa>(dy) : deviation, deviation);
  }
  // Packs that are `stride` apart.
  template <int kPacks>
  static SYNCBN_INLINE Terms load_packs(const T* dy, const T* x, int64_t stride, const P& center) {
    if constexpr (kPacks == 1) {
      return load_pack(dy, x, center);
    } else {
      constexpr int kHalf = kPacks / 2;
      Terms sum = load_packs<kHalf>(dy, x, stride, center);
      sum.add(load_packs<kHalf>(dy + kHalf * stride, x + kHalf * stride, stride, center));
      return sum;
    }
  }
  template <int kPacks>
  static SYNCBN_INLINE void prefetch_packs(const T* dy, const T* x, int64_t stride) {
    for (int i = 0; i < kPacks; ++i) {
      __builtin_prefetch(x + i * stride);
      if constexpr (kWithGrad) {
        __builtin_prefetch(dy + i * stride);
      }
    }
  }
  SYNCBN_INLINE void add(const Terms& other) {
    weights = weights + other.weights;
    products = products + other.products;
  }
};

// One channel of planes.
template <typename T, typename Isa, bool kWithGrad>
SYNCBN_INLINE void planar_sums(const T* dy, const T* x, const Geometry& geometry, const Item& item,
                               compute_t<T> center, double& weights, double& products) {
  using A = compute_t<T>;
  using P = Pack<A, Isa>;
  using GroupTerms = Terms<T, Isa, kWithGrad>;
  constexpr int kSize = P::kSize;
  const P centers = P::broadcast(center);
  using Vector = typename P::Vector;
  CompensatedSum<Vector> weight_sum{}, product_sum{};
  for (Spans spans(geometry, item.channel, item.begin, item.length); spans.left > 0; spans.next()) {
    const T* const span_x = x + spans.offset;
    const T* const span_dy = dy + spans.offset;
    const int64_t n = spans.length();
    int64_t i = 0;
    for (; i + kGroup * kSize <= n; i += kGroup * kSize) {
      constexpr int64_t kAhead = kAheadBytes<kWithGrad> / sizeof(T);
      GroupTerms::template prefetch_packs<kGroup>(span_dy + i + kAhead, span_x + i + kAhead, kSize);
      const GroupTerms group =
          GroupTerms::template load_packs<kGroup>(span_dy + i, span_x + i, kSize, centers);
      weight_sum.add(group.weights.low + group.weights.high);
      product_sum.add(group.products.low + group.products.high);
    }
    if (i == n) {
      continue;
    }
    GroupTerms rest{P::zero(), P::zero()};
    for (; i + kSize <= n; i += kSize) {
      rest.add(GroupTerms::load_pack(span_dy + i, span_x + i, centers));
    }
    if (const int64_t count = n - i; count > 0) {
      const bool overlaps = n >= kSize;  // with values that are summed already
      P last = overlaps ? load<T, Isa>(span_x + n - kSize) : load_last<T, Isa>(span_x + n, count);
      const P deviation = keep_last<T, Isa>(last - centers, count);
      if constexpr (kWithGrad) {
        last = overlaps ? load<T, Isa>(span_dy + n - kSize) : load_last<T, Isa>(span_dy + n, count);
        last = keep_last<T, Isa>(last, count);
      }
      rest.add(GroupTerms::of(last, deviation));
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

// Rows that lie `stride` apart, of kMaxColumns at most. Centers, and the sums, which are
// overwritten, are those of columns.
template <typename T, typename Isa, bool kWithGrad>
SYNCBN_INLINE void column_sums(const T* dy, const T* x, int64_t stride, int64_t rows, int64_t width,
                               const compute_t<T>* column_centers, double* weights,
                               double* products) {
  using A = compute_t<T>;
  using P = Pack<A, Isa>;
  using GroupTerms = Terms<T, Isa, kWithGrad>;
  constexpr int kSize = P::kSize;
  const Columns<T, Isa> columns{width};
  const int64_t lanes = columns.lanes();
  alignas(64) A centers[kMaxColumns];
  alignas(64) A sums[4][kMaxColumns];
  columns.for_each_lane(
      [&](int64_t lane, int64_t column) { centers[lane] = column_centers[column]; });
  for (auto& sum : sums) {
    std::fill(sum, sum + lanes, static_cast<A>(0));
  }
  const auto add = [&](int64_t lane, const GroupTerms& terms) __attribute__((always_inline)) {
    CompensatedSum<P> weight_sum{P::read(sums[0] + lane), P::read(sums[1] + lane)};
    CompensatedSum<P> product_sum{P::read(sums[2] + lane), P::read(sums[3] + lane)};
    weight_sum.add(terms.weights);
    product_sum.add(terms.products);
    weight_sum.sum.write(sums[0] + lane);
    weight_sum.lost.write(sums[1] + lane);
    product_sum.sum.write(sums[2] + lane);
    product_sum.lost.write(sums[3] + lane);
  };
  // A group of rows is taken side by side, but those after it are read ahead one after another, if
  // they lie so: memory is fastest that way.
  const bool adjoin = stride == width;
  const int64_t rows_ahead = round_up(ceil_div(kPrefetchBytes / sizeof(T), width), kGroup);
  int64_t row = 0;
  if (!columns.narrow()) {
    for (; row + kGroup <= rows; row += kGroup) {
      for (int64_t lane = 0; lane < lanes; lane += kSize) {
        const int64_t ahead = (row + rows_ahead) * stride + (adjoin ? kGroup * lane : lane);
        GroupTerms::template prefetch_packs<kGroup>(dy + ahead, x + ahead, adjoin ? kSize : stride);
        const int64_t at = row * stride + std::min(lane, width - kSize);
        add(lane, GroupTerms::template load_packs<kGroup>(dy + at, x + at, stride,
                                                          P::read(centers + lane)));
      }
    }
  }
  for (; row < rows; ++row) {
    for (int64_t pack = 0; pack < columns.packs(); ++pack) {
      const int64_t lane = pack * kSize;
      const P deviation = columns.load_pack(x + row * stride, pack) - P::read(centers + lane);
      const P weight = kWithGrad ? columns.load_pack(dy + row * stride, pack) : deviation;
      add(lane, GroupTerms::of(weight, deviation));
    }
  }
  columns.for_each_lane([&](int64_t lane, int64_t column) {
    weights[column] = static_cast<double>(sums[0][lane]) - static_cast<double>(sums[1][lane]);
    products[column] = static_cast<double>(sums[2][lane]) - static_cast<double>(sums[3][lane]);
  });
}

// The channels of an item of rows. Centers, and the sums, which are overwritten, are those of
// channels.
template <typename T, typename Isa, bool kWithGrad>
SYNCBN_INLINE void row_sums(const T* dy, const T* x, const Geometry& geometry, const Item& item,
                            const compute_t<T>* centers, double* weights, double* products) {
  const int64_t inner = geometry.inner;
  const int64_t stride = geometry.channels * inner;
  const int64_t width = item.channels * inner;
  const int64_t first = item.begin * stride + item.channel * inner;
  const int64_t wide = width == stride ? rows_per_wide_row(width, kMaxColumns) : 1;
  if (inner == 1 && wide == 1) {
    return column_sums<T, Isa, kWithGrad>(dy + first, x + first, stride, item.length, width,
                                          centers, weights, products);
  }
  std::fill(weights, weights + item.channels, 0);
  std::fill(products, products + item.channels, 0);
  compute_t<T> column_centers[kMaxColumns];
  double column_weights[kMaxColumns];
  double column_products[kMaxColumns];
  const int64_t wide_rows = item.length / wide;
  for (bool is_wide : {true, false}) {
    const int64_t rows_in_one = is_wide ? wide : 1;
    const int64_t rows = is_wide ? wide_rows : item.length - wide_rows * wide;
    const int64_t at = first + (is_wide ? 0 : wide_rows * wide * stride);
    const auto for_each_column = [&](const auto& function) {
      int64_t column = 0;
      for (int64_t row = 0; row < rows_in_one; ++row) {
        for (int64_t c = 0; c < item.channels; ++c) {
          for (int64_t i = 0; i < inner; ++i) {
            function(column++, c);
          }
        }
      }
    };
    for_each_column([&](int64_t column, int64_t c) { column_centers[column] = centers[c]; });
    column_sums<T, Isa, kWithGrad>(dy + at, x + at, stride * rows_in_one, rows, width * rows_in_one,
                                   column_centers, column_weights, column_products);
    for_each_column([&](int64_t column, int64_t c) {
      weights[c] += column_weights[column];
      products[c] += column_products[column];
    });
  }
}

}  // namespace syncbn::cpu
