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
#include "masked_sums.h"
#include "operators.h"

namespace syncbn::cpu {
namespace {

// Sums of floats are carried in more bits than the result has. Those of doubles are not: a center
// off the mean costs accuracy, so that it is guessed from more values and rounded less.
template <typename A>
constexpr int kSamples = sizeof(A) == 4 ? 8 : kMaxSamples;
template <typename A>
constexpr A kFineness = sizeof(A) == 4 ? 1 : 0.25;

// The distance from the mean, squared and in variances, from which on a center is far. It
// multiplies the error of the squares by 1 + kFar at most.
template <typename A>
constexpr double kFar = sizeof(A) == 4 ? 4 : 1;

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

// A guess of one channel's mean from some of its values.
template <typename A>
A guess_center(const A (&values)[kSamples<A>]) {
  A sum = 0;
  for (const A value : values) {
    sum += value;
  }
  const A mean = sum / kSamples<A>;
  A spread = 0;
  for (const A value : values) {
    spread = std::max(spread, std::abs(value - mean));
  }
  return round_to_multiple(mean, spread);
}

// The same of `channels` channels from rows that lie `stride` apart, of whose `inner` values the
// first is taken.
template <typename T>
struct GuessCenters {
  using A = compute_t<T>;

  template <typename Isa>
  static SYNCBN_INLINE void run(const T* const* rows, int64_t channels, int64_t inner, A* centers) {
    const Columns<T, Isa> columns{channels * inner};
    using P = Pack<A, Isa>;
    A lane_centers[kMaxColumns];
    A column_centers[kMaxColumns];
    for (int64_t pack = 0; pack < columns.packs(); ++pack) {
      P values[kSamples<A>];
      P center = P::zero();
      for (int i = 0; i < kSamples<A>; ++i) {
        values[i] = columns.load_pack(rows[i], pack);
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
    for (int64_t c = 0; c < channels; ++c) {
      centers[c] = column_centers[c * inner];
    }
  }
};

// Moments from sums of deviations from centers and of their squares, and how many centers were far.
template <typename A>
struct MomentsOfSums {
  template <typename Isa>
  static SYNCBN_INLINE void run(int64_t channels, double count, const A* centers,
                                const double* deviations, const double* squares, double* means,
                                double* m2s, int64_t* num_far) {
    int64_t far = 0;
    SYNCBN_INDEPENDENT
    for (int64_t c = 0; c < channels; ++c) {
      const SegmentMoments moments =
          moments_of_sums<A>(count, centers[c], deviations[c], squares[c]);
      means[c] = moments.mean;
      m2s[c] = moments.m2;
      far += moments.center_is_far;
    }
    *num_far = far;
  }
};

// The moments of one channel of planes. `masked` is null where all places count.
template <typename T>
void planar_moments(const T* x, const Geometry& geometry, const Item& item,
                    const MaskedSegment* masked, double* mean, double* m2) {
  using A = compute_t<T>;
  const int64_t places = masked != nullptr ? masked->count : item.length;
  if (places == 0) {
    *mean = 0;
    *m2 = 0;
    return;
  }
  const auto count = static_cast<double>(places);
  A values[kSamples<A>];
  for (int i = 0; i < kSamples<A>; ++i) {
    const int64_t place = masked != nullptr
                              ? masked->samples[i]
                              : item.begin + sample_position(i, kSamples<A>, item.length);
    values[i] = to_compute(x[Spans(geometry, item.channel, place, 1).offset]);
  }
  A center = guess_center(values);
  const SummedTensors<DeviationTerms, T> tensors{{x}};
  for (bool again : {true, false}) {
    double deviations;
    double squares;
    if (masked != nullptr) {
      // A value of T, which fills masked places: their deviations are exactly zero then.
      const T fill = static_cast<T>(center);
      center = to_compute(fill);
      masked_planar_sums<DeviationTerms, T>(tensors, masked->mask, {&fill}, geometry, item,
                                            {&center}, &deviations, &squares);
    } else {
      // Constants of all channels, of which only the item's is looked at.
      const DeviationTerms<const A*> centers{&center - item.channel};
      dispatch_isa<PlanarSums<DeviationTerms, T>>(&tensors, &geometry, &item, &centers, &deviations,
                                                  &squares);
    }
    const SegmentMoments moments = moments_of_sums<A>(count, center, deviations, squares);
    *mean = moments.mean;
    *m2 = moments.m2;
    if (!moments.center_is_far || !again) {
      return;
    }
    center = better_center<A>(moments, count);
  }
}

// The moments of the channels of an item of rows, in `means` and `m2s`.
template <typename T>
class RowMoments {
 public:
  using A = compute_t<T>;

  RowMoments(const T* x, const Geometry& geometry, const Item& item, const MaskedSegment* masked)
      : x_(x), geometry_(geometry), item_(item), masked_(masked) {}

  void compute(double* means, double* m2s) {
    const int64_t places = masked_ != nullptr ? masked_->count : item_.length * geometry_.inner;
    std::fill(means, means + item_.channels, 0);
    std::fill(m2s, m2s + item_.channels, 0);
    if (places == 0) {
      return;
    }
    const auto count = static_cast<double>(places);
    guess();
    for (bool again : {true, false}) {
      if (masked_ != nullptr) {
        round_centers();
      }
      sum();
      int64_t num_far = 0;
      dispatch_isa<MomentsOfSums<A>>(item_.channels, count, &centers_[0], &deviations_[0],
                                     &squares_[0], means, m2s, &num_far);
      if (num_far == 0 || !again) {
        return;
      }
      for (int64_t c = 0; c < item_.channels; ++c) {
        centers_[c] = better_center<A>({means[c], m2s[c], true}, count);
      }
    }
  }

 private:
  // The position in the segment of sample number `i`, in places.
  int64_t sample(int i) const {
    if (masked_ != nullptr) {
      return masked_->samples[i];
    }
    return (item_.begin + sample_position(i, kSamples<A>, item_.length)) * geometry_.inner;
  }

  void guess() {
    const int64_t inner = geometry_.inner;
    const int64_t stride = geometry_.channels * inner;
    const T* rows[kSamples<A>];
    for (int i = 0; i < kSamples<A>; ++i) {
      const int64_t place = sample(i);
      rows[i] = x_ + place / inner * stride + item_.channel * inner;
    }
    if (masked_ == nullptr || inner == 1) {
      dispatch_isa<GuessCenters<T>>(&rows[0], item_.channels, inner, &centers_[0]);
      return;
    }
    // The first value of a plane may be masked: the sampled ones are brought together.
    T sampled[kSamples<A>][kMaxColumns];
    for (int i = 0; i < kSamples<A>; ++i) {
      const T* const from = rows[i] + sample(i) % inner;
      for (int64_t c = 0; c < item_.channels; ++c) {
        sampled[i][c] = from[c * inner];
      }
      rows[i] = &sampled[i][0];
    }
    dispatch_isa<GuessCenters<T>>(&rows[0], item_.channels, /*inner=*/int64_t{1}, &centers_[0]);
  }

  // To values of T, which fill masked places: their deviations are exactly zero then.
  void round_centers() {
    for (int64_t c = 0; c < item_.channels; ++c) {
      fills_[c] = static_cast<T>(centers_[c]);
      centers_[c] = to_compute(fills_[c]);
    }
  }

  void sum() {
    const SummedTensors<DeviationTerms, T> tensors{{x_}};
    if (masked_ != nullptr) {
      masked_row_sums<DeviationTerms, T>(tensors, masked_->mask, {&fills_[0]}, geometry_, item_,
                                         {&centers_[0]}, &deviations_[0], &squares_[0]);
      return;
    }
    // Constants of all channels, of which only those of the item are looked at.
    const DeviationTerms<const A*> centers{&centers_[0] - item_.channel};
    dispatch_isa<RowSums<DeviationTerms, T>>(&tensors, &geometry_, &item_, &centers,
                                             &deviations_[0], &squares_[0]);
  }

  const T* x_;
  const Geometry& geometry_;
  const Item& item_;
  const MaskedSegment* masked_;
  A centers_[kMaxColumns];
  T fills_[kMaxColumns];
  double deviations_[kMaxColumns];
  double squares_[kMaxColumns];
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

Tensor batch_norm_stats(const Tensor& input, std::optional<double> fingerprint, double next_size,
                        std::optional<Tensor> mask) {
  constexpr const char* kOp = "syncbn::batch_norm_stats";
  const Geometry geometry = check_input(kOp, "input", input);
  const uint8_t* const places = check_mask(kOp, mask, input, geometry);
  const Partition partition(geometry);
  const int64_t channels = geometry.channels;
  std::vector<double> means(partition.segments * channels);
  std::vector<double> m2s(partition.segments * channels);

  std::vector<MaskedSegment> masked;
  if (places != nullptr) {
    masked = find_segments(
        places, geometry, partition,
        input.scalar_type() == ScalarType::Double ? kSamples<double> : kSamples<float>);
  }

  dispatch_dtype(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    for_each_item(geometry, partition, [&](const Item& item) {
      const MaskedSegment* const segment = places != nullptr ? &masked[item.segment] : nullptr;
      double* const mean = &means[item.segment * channels + item.channel];
      double* const m2 = &m2s[item.segment * channels + item.channel];
      if (is_in_rows(geometry)) {
        RowMoments<T>(x, geometry, item, segment).compute(mean, m2);
      } else {
        planar_moments<T>(x, geometry, item, segment, mean, m2);
      }
    });
  });

  // The first segment takes up the others.
  int64_t before = 0;
  for (int64_t segment = 0; segment < partition.segments; ++segment) {
    const int64_t count =
        places != nullptr ? masked[segment].count : places_of_segment(geometry, partition, segment);
    if (segment > 0) {
      dispatch_isa<Merge>(channels, static_cast<double>(before), means.data(), m2s.data(),
                          static_cast<double>(count), &means[segment * channels],
                          &m2s[segment * channels]);
    }
    before += count;
  }
  const Tail tail = to_tail(fingerprint, next_size);
  const int64_t size = tail.present ? size_with_tail(channels) : 2 * channels + 1;
  Tensor message = allocate_vector(size, ScalarType::Double, input);
  auto* values = static_cast<double*>(message.mutable_data_ptr());
  const auto count = static_cast<double>(before);
  dispatch_unfused<Message>(count, means.data(), m2s.data(), channels, values);
  write_tail(values, channels, count, tail);
  return message;
}

}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_stats", TORCH_BOX(&syncbn::cpu::batch_norm_stats));
}
