// batch_norm_stats on the CPU.
//
// Each item of work owns a segment of positions of some channels. It guesses each channel's mean
// from a few values spread over the segment, then goes through it once, adding up the deviations
// from that center and their squares. The squares are corrected for the center in double, which is
// exact enough unless it was far from the mean: then the item goes through its segment once more,
// with the mean that it found. Segments are merged exactly in double.
//
// A center is rounded to a multiple of about the standard deviation. Subtracting it then loses no
// bits of the values, and a mean near zero is as good as if they had been added up themselves.

#include <cmath>
#include <vector>

#include "../common/allocate.h"
#include "../common/checks.h"
#include "../common/message.h"
#include "../common/moments.h"
#include "channel_sums.h"
#include "dispatch.h"
#include "operators.h"

namespace syncbn::cpu {
namespace {

// Sums of floats are carried in more bits than the result has. Those of doubles are not: a center
// off the mean costs accuracy, so that it is guessed from more values and rounded less.
template <typename A>
constexpr int kSamples = sizeof(A) == 4 ? 8 : 32;
template <typename A>
constexpr A kFineness = sizeof(A) == 4 ? 1 : 0.25;

// The distance from the mean, squared and in variances, from which on a center is far. It
// multiplies the error of the squares by 1 + kFar at most.
template <typename A>
constexpr double kFar = sizeof(A) == 4 ? 4 : 1;

// The position of sample number `sample` of `count` positions.
template <typename A>
SYNCBN_INLINE int64_t sample_position(int sample, int64_t count) {
  return count * (2 * sample + 1) / (2 * kSamples<A>);
}

// The multiples next to `x` of kFineness times the largest powers of two that are no more than
// `spread`; x itself if the spread is zero, and where the values are too large to be squared
// anyway.
template <typename A, typename Vector>
SYNCBN_INLINE void round_to_multiples(Vector& x, const Vector& spread) {
  using Integers = decltype(x == x);
  constexpr int64_t kMantissa = sizeof(A) == 4 ? 23 : 52;
  constexpr A kLargest = sizeof(A) == 4 ? 1e30 : 1e280;
  constexpr A kShift = 3 * (int64_t{1} << (kMantissa - 1)) * kFineness<A>;
  const Integers exponents = (Integers)spread >> kMantissa << kMantissa;
  // Adding this leaves no bits for less than the power of two.
  const Vector large = spread < kLargest ? (Vector)exponents * kShift : Vector{};
  x = (x + large) - large;
}

template <typename A>
SYNCBN_INLINE A round_to_multiple(A x, A spread) {
  typename Pack<A, Baseline>::Vector rounded = x - typename Pack<A, Baseline>::Vector{};
  round_to_multiples<A>(rounded, spread - typename Pack<A, Baseline>::Vector{});
  return rounded[0];
}

// Raises `largest` to |x| where that is larger.
template <typename Vector>
SYNCBN_INLINE void raise_to_absolute(Vector& largest, const Vector& x) {
  const Vector negative = Vector{} - x;
  const Vector absolute = x > negative ? x : negative;
  largest = absolute > largest ? absolute : largest;
}

struct SegmentMoments {
  double mean;
  double m2;
  bool center_is_far;  // from the mean
};

// Needs the sums of `count` deviations from `center` and of their squares.
template <typename A>
SYNCBN_INLINE SegmentMoments moments_of_sums(double count, double center, double deviations,
                                             double squares) {
  const double offset = deviations / count;
  const double correction = deviations * offset;
  const double m2 = squares - correction;
  return {center + offset, m2 < 0 ? 0 : m2, correction > kFar<A> * m2};
}

template <typename A>
SYNCBN_INLINE A better_center(const SegmentMoments& moments, double count) {
  return static_cast<A>(round_to_multiple(moments.mean, std::sqrt(moments.m2 / count)));
}

template <typename T>
struct PlanarMoments {
  using A = compute_t<T>;

  static SYNCBN_INLINE A guess(const T* x, const Geometry& geometry, const Item& item) {
    A values[kSamples<A>];
    A sum = 0;
    for (int i = 0; i < kSamples<A>; ++i) {
      const int64_t position = item.begin + sample_position<A>(i, item.length);
      values[i] = to_compute(x[Spans(geometry, item.channel, position, 1).offset]);
      sum += values[i];
    }
    const A mean = sum / kSamples<A>;
    A spread = 0;
    for (const A value : values) {
      spread = std::max(spread, std::abs(value - mean));
    }
    return round_to_multiple(mean, spread);
  }

  template <typename Isa>
  static SYNCBN_INLINE void run(const T* x, const Geometry* geometry, const Item* item,
                                double* mean, double* m2) {
    const auto count = static_cast<double>(item->length);
    A center = guess(x, *geometry, *item);
    double deviations, squares;
    planar_sums<DeviationTerms, T, Isa>({{x}}, *geometry, *item, {center}, deviations, squares);
    SegmentMoments moments = moments_of_sums<A>(count, center, deviations, squares);
    if (moments.center_is_far) {
      center = better_center<A>(moments, count);
      planar_sums<DeviationTerms, T, Isa>({{x}}, *geometry, *item, {center}, deviations, squares);
      moments = moments_of_sums<A>(count, center, deviations, squares);
    }
    *mean = moments.mean;
    *m2 = moments.m2;
  }
};

template <typename T>
struct RowMoments {
  using A = compute_t<T>;

  // Takes the first value of each channel in some rows.
  template <typename Isa>
  static SYNCBN_INLINE void guess(const T* x, const Geometry& geometry, const Item& item,
                                  A* centers) {
    const int64_t stride = geometry.channels * geometry.inner;
    const Columns<T, Isa> columns{item.channels * geometry.inner};
    using P = Pack<A, Isa>;
    A lane_centers[kMaxColumns];
    A column_centers[kMaxColumns];
    for (int64_t pack = 0; pack < columns.packs(); ++pack) {
      P values[kSamples<A>];
      P center = P::zero();
      for (int i = 0; i < kSamples<A>; ++i) {
        const int64_t row = item.begin + sample_position<A>(i, item.length);
        values[i] = columns.load_pack(x + row * stride + item.channel * geometry.inner, pack);
        center = center + values[i];
      }
      center = center * P::broadcast(static_cast<A>(1) / kSamples<A>);
      P spread = P::zero();
      for (const P& value : values) {
        raise_to_absolute(spread.low, value.low - center.low);
        raise_to_absolute(spread.high, value.high - center.high);
      }
      round_to_multiples<A>(center.low, spread.low);
      round_to_multiples<A>(center.high, spread.high);
      center.write(lane_centers + pack * P::kSize);
    }
    columns.for_each_lane(
        [&](int64_t lane, int64_t column) { column_centers[column] = lane_centers[lane]; });
    for (int64_t c = 0; c < item.channels; ++c) {
      centers[c] = column_centers[c * geometry.inner];
    }
  }

  template <typename Isa>
  static SYNCBN_INLINE void run(const T* x, const Geometry* geometry, const Item* item,
                                double* means, double* m2s) {
    const int64_t channels = item->channels;
    const auto count = static_cast<double>(item->length * geometry->inner);
    A centers[kMaxColumns];
    double deviations[kMaxColumns];
    double squares[kMaxColumns];
    guess<Isa>(x, *geometry, *item, centers);
    for (bool again : {true, false}) {
      row_sums<DeviationTerms, T, Isa>({{x}}, *geometry, *item, {centers}, deviations, squares);
      int64_t num_far = 0;
      SYNCBN_INDEPENDENT
      for (int64_t c = 0; c < channels; ++c) {
        const SegmentMoments moments =
            moments_of_sums<A>(count, centers[c], deviations[c], squares[c]);
        means[c] = moments.mean;
        m2s[c] = moments.m2;
        num_far += moments.center_is_far;
      }
      if (num_far == 0 || !again) {
        return;
      }
      for (int64_t c = 0; c < channels; ++c) {
        centers[c] = better_center<A>({means[c], m2s[c], true}, count);
      }
    }
  }
};

// Adds moments of `count` values in each channel to those of `before` values.
struct Merge {
  template <typename Isa>
  static SYNCBN_INLINE void run(int64_t channels, double before, double* mean, double* m2,
                                double count, const double* other_mean, const double* other_m2) {
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < channels; ++c) {
      Moments<double> total{before, mean[c], m2[c]};
      total.merge({count, other_mean[c], other_m2[c]});
      mean[c] = total.mean;
      m2[c] = total.m2;
    }
  }
};

struct Message {
  template <typename Isa>
  static SYNCBN_INLINE void run(double count, const double* means, const double* m2s,
                                int64_t channels, double* message) {
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < channels; ++c) {
      const Sums sums = to_sums({count, means[c], m2s[c]});
      message[c] = sums.values;
      message[channels + c] = sums.squares;
    }
  }
};

}  // namespace

Tensor batch_norm_stats(const Tensor& input, std::optional<double> tag, double outlook) {
  const Geometry geometry = check_input("syncbn::batch_norm_stats", "input", input);
  const Partition partition(geometry);
  const int64_t channels = geometry.channels;
  std::vector<double> means(partition.segments * channels);
  std::vector<double> m2s(partition.segments * channels);

  dispatch_dtype(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    for_each_item(geometry, partition, [&](const Item& item) {
      double* const mean = &means[item.segment * channels + item.channel];
      double* const m2 = &m2s[item.segment * channels + item.channel];
      if (is_in_rows(geometry)) {
        dispatch_isa<RowMoments<T>>(x, &geometry, &item, mean, m2);
      } else {
        dispatch_isa<PlanarMoments<T>>(x, &geometry, &item, mean, m2);
      }
    });
  });

  // The first segment takes up the others.
  const int64_t values_per_unit = geometry.per_channel() / std::max<int64_t>(partition.length, 1);
  for (int64_t segment = 1; segment < partition.segments; ++segment) {
    const int64_t before = segment * partition.segment_length;
    const int64_t count = std::min(partition.segment_length, partition.length - before);
    dispatch_isa<Merge>(channels, static_cast<double>(before * values_per_unit), means.data(),
                        m2s.data(), static_cast<double>(count * values_per_unit),
                        &means[segment * channels], &m2s[segment * channels]);
  }
  const Announcement announcement = to_announcement(tag, outlook);
  const int64_t size = announcement.present ? announced_size(channels) : 2 * channels + 1;
  Tensor message = allocate_vector(size, ScalarType::Double, input);
  auto* values = static_cast<double*>(message.mutable_data_ptr());
  const auto count = static_cast<double>(geometry.per_channel());
  dispatch_unfused<Message>(count, means.data(), m2s.data(), channels, values);
  write_end(values, channels, count, announcement);
  return message;
}

}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&syncbn::cpu::batch_norm_stats));
}
