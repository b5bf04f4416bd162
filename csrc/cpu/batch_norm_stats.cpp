// batch_norm_stats on the CPU.
//
// Each task reads a segment of some channels. It guesses each channel's mean, the center, from a
// few values of the segment and adds up the deviations from the center and their squares in one
// pass. The squares are corrected for the center in double, which is exact enough unless the center
// was far from the mean: then the task repeats the pass with the computed mean as center. Segments
// are merged exactly in double.
//
// A center is rounded to a multiple of about the standard deviation. Its subtraction then loses no
// bits of the values, and a mean near zero is as accurate as the sum of the values themselves.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "../common/allocate.h"
#include "../common/message.h"
#include "../common/moments.h"
#include "../common/operators.h"
#include "channel_sums.h"
#include "dispatch.h"
#include "masked_sums.h"

namespace syncbn::cpu {
namespace {

// Sums of floats have more bits than the result, sums of doubles have not: a center off the mean
// costs accuracy, so it is guessed from more values and rounded less.
template <typename A>
constexpr int kSamples = sizeof(A) == 4 ? 8 : kMaxSamples;
template <typename A>
constexpr A kFineness = sizeof(A) == 4 ? 1 : 0.25;

// A center is far if its squared distance from the mean is more than kFar variances. A nearer
// center multiplies the error of the squares by at most 1 + kFar.
template <typename A>
constexpr double kFar = sizeof(A) == 4 ? 4 : 1;

// Rounds each x to a multiple of kFineness times the largest power of two up to its `spread`. If
// the spread is zero, or so large that squares overflow anyway, x keeps its value.
template <typename A, typename Vector>
SYNCBN_INLINE void round_to_multiples(Vector& x, const Vector& spread) {
  using Integers = decltype(x == x);
  constexpr int64_t kMantissa = sizeof(A) == 4 ? 23 : 52;
  constexpr A kLargest = sizeof(A) == 4 ? 1e30 : 1e280;
  constexpr A kShift = 3 * (int64_t{1} << (kMantissa - 1)) * kFineness<A>;
  const Integers exponents = (Integers)spread >> kMantissa << kMantissa;
  // A sum with this number has no bits below the power of two.
  const Vector large = spread < kLargest ? (Vector)exponents * kShift : Vector{};
  x = (x + large) - large;
}

template <typename A>
SYNCBN_INLINE A round_to_multiple(A x, A spread) {
  typename Pack<A, Baseline>::Vector rounded = x - typename Pack<A, Baseline>::Vector{};
  round_to_multiples<A>(rounded, spread - typename Pack<A, Baseline>::Vector{});
  return rounded[0];
}

// largest = max(largest, |x|)
template <typename Vector>
SYNCBN_INLINE void raise_to_absolute(Vector& largest, const Vector& x) {
  const Vector negative = Vector{} - x;
  const Vector absolute = x > negative ? x : negative;
  largest = absolute > largest ? absolute : largest;
}

struct SegmentMoments {
  double mean;
  double m2;
  bool center_is_far;
};

// `deviations` and `squares` are sums over `count` values.
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

// Rounds a center to a value of T. A rounded mean of halves may be larger than the largest half.
template <typename T>
T to_value(compute_t<T> center) {
  if constexpr (std::is_same_v<T, Half>) {
    constexpr auto kLargest = static_cast<float>(largest_finite(DType::kHalf));
    center = std::clamp(center, -kLargest, kLargest);
  }
  return static_cast<T>(center);
}

// Guesses one channel's mean from some of its values.
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

// The same for `channels` channels: of each row, the first of a channel's `inner` values is taken.
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

// moments_of_sums() for each channel, and the number of far centers.
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

// The moments of one channel of planes. `masked` is null without a mask.
template <typename T>
void planar_moments(const T* x, const Geometry& geometry, const Task& task,
                    const MaskedSegment* masked, double* mean, double* m2) {
  using A = compute_t<T>;
  const int64_t positions = masked != nullptr ? masked->count : task.length;
  if (positions == 0) {
    *mean = 0;
    *m2 = 0;
    return;
  }
  const auto count = static_cast<double>(positions);
  A values[kSamples<A>];
  for (int i = 0; i < kSamples<A>; ++i) {
    const int64_t position = masked != nullptr
                                 ? masked->samples[i]
                                 : task.begin + sample_position(i, kSamples<A>, task.length);
    values[i] = to_compute(x[Spans(geometry, task.channel, position, 1).offset]);
  }
  A center = guess_center(values);
  const SummedTensors<DeviationTerms, T> tensors{{x}};
  for (bool again : {true, false}) {
    double deviations;
    double squares;
    if (masked != nullptr) {
      // Masked positions are filled with a value of T: their deviations are exactly zero then.
      const T fill = to_value<T>(center);
      center = to_compute(fill);
      masked_planar_sums<DeviationTerms, T>(tensors, masked->mask, {&fill}, geometry, task,
                                            {&center}, &deviations, &squares);
    } else {
      // An array of all channels' constants, from which only the task's channel is read.
      const DeviationTerms<const A*> centers{&center - task.channel};
      dispatch_isa<PlanarSums<DeviationTerms, T>>(&tensors, &geometry, &task, &centers, &deviations,
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

// The moments of the channels of a task of rows, in `means` and `m2s`.
template <typename T>
class RowMoments {
 public:
  using A = compute_t<T>;

  RowMoments(const T* x, const Geometry& geometry, const Task& task, const MaskedSegment* masked)
      : x_(x), geometry_(geometry), task_(task), masked_(masked) {}

  void compute(double* means, double* m2s) {
    const int64_t positions = masked_ != nullptr ? masked_->count : task_.length * geometry_.inner;
    std::fill(means, means + task_.channels, 0);
    std::fill(m2s, m2s + task_.channels, 0);
    if (positions == 0) {
      return;
    }
    const auto count = static_cast<double>(positions);
    guess();
    for (bool again : {true, false}) {
      if (masked_ != nullptr) {
        round_centers();
      }
      sum();
      int64_t num_far = 0;
      dispatch_isa<MomentsOfSums<A>>(task_.channels, count, &centers_[0], &deviations_[0],
                                     &squares_[0], means, m2s, &num_far);
      if (num_far == 0 || !again) {
        return;
      }
      for (int64_t c = 0; c < task_.channels; ++c) {
        centers_[c] = better_center<A>({means[c], m2s[c], true}, count);
      }
    }
  }

 private:
  // The position of sample number `i`.
  int64_t sample(int i) const {
    if (masked_ != nullptr) {
      return masked_->samples[i];
    }
    return (task_.begin + sample_position(i, kSamples<A>, task_.length)) * geometry_.inner;
  }

  void guess() {
    const int64_t inner = geometry_.inner;
    const int64_t stride = geometry_.channels * inner;
    const T* rows[kSamples<A>];
    for (int i = 0; i < kSamples<A>; ++i) {
      const int64_t position = sample(i);
      rows[i] = x_ + position / inner * stride + task_.channel * inner;
    }
    if (masked_ == nullptr || inner == 1) {
      dispatch_isa<GuessCenters<T>>(&rows[0], task_.channels, inner, &centers_[0]);
      return;
    }
    // The first value of a plane may be masked: the sampled values are copied.
    T sampled[kSamples<A>][kMaxColumns];
    for (int i = 0; i < kSamples<A>; ++i) {
      const T* const from = rows[i] + sample(i) % inner;
      for (int64_t c = 0; c < task_.channels; ++c) {
        sampled[i][c] = from[c * inner];
      }
      rows[i] = &sampled[i][0];
    }
    dispatch_isa<GuessCenters<T>>(&rows[0], task_.channels, /*inner=*/int64_t{1}, &centers_[0]);
  }

  // Rounds centers to T, for masked positions: their deviations are exactly zero then.
  void round_centers() {
    for (int64_t c = 0; c < task_.channels; ++c) {
      fills_[c] = to_value<T>(centers_[c]);
      centers_[c] = to_compute(fills_[c]);
    }
  }

  void sum() {
    const SummedTensors<DeviationTerms, T> tensors{{x_}};
    if (masked_ != nullptr) {
      masked_row_sums<DeviationTerms, T>(tensors, masked_->mask, {&fills_[0]}, geometry_, task_,
                                         {&centers_[0]}, &deviations_[0], &squares_[0]);
      return;
    }
    // An array of all channels' constants, from which only the task's channels are read.
    const DeviationTerms<const A*> centers{&centers_[0] - task_.channel};
    dispatch_isa<RowSums<DeviationTerms, T>>(&tensors, &geometry_, &task_, &centers,
                                             &deviations_[0], &squares_[0]);
  }

  const T* x_;
  const Geometry& geometry_;
  const Task& task_;
  const MaskedSegment* masked_;
  A centers_[kMaxColumns];
  T fills_[kMaxColumns];
  double deviations_[kMaxColumns];
  double squares_[kMaxColumns];
};

// Merges moments of `count` values of each channel into moments of `before` values.
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

StatsResults batch_norm_stats(const ForwardArguments& a) {
  check_arguments(a);
  const Tensor& input = a.input;
  const Geometry geometry = check_layout("input", input);
  const Tail tail = read_tail(a.tail);
  const uint8_t* const mask_data = check_mask(a.mask, input, geometry);
  const Partition partition(geometry);
  const int64_t channels = geometry.channels;
  std::vector<double> means(partition.segments * channels);
  std::vector<double> m2s(partition.segments * channels);

  std::vector<MaskedSegment> masked;
  if (mask_data != nullptr) {
    masked = find_segments(
        mask_data, geometry, partition,
        input.scalar_type() == ScalarType::Double ? kSamples<double> : kSamples<float>);
  }

  dispatch_dtype(input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(input.const_data_ptr());
    for_each_task(geometry, partition, [&](const Task& task) {
      const MaskedSegment* const segment = mask_data != nullptr ? &masked[task.segment] : nullptr;
      double* const mean = &means[task.segment * channels + task.channel];
      double* const m2 = &m2s[task.segment * channels + task.channel];
      if (is_in_rows(geometry)) {
        RowMoments<T>(x, geometry, task, segment).compute(mean, m2);
      } else {
        planar_moments<T>(x, geometry, task, segment, mean, m2);
      }
    });
  });

  // The moments of the other segments are merged into the moments of the first.
  int64_t before = 0;
  for (int64_t segment = 0; segment < partition.segments; ++segment) {
    const int64_t count = mask_data != nullptr ? masked[segment].count
                                               : positions_of_segment(geometry, partition, segment);
    if (segment > 0) {
      dispatch_isa<Merge>(channels, static_cast<double>(before), means.data(), m2s.data(),
                          static_cast<double>(count), &means[segment * channels],
                          &m2s[segment * channels]);
    }
    before += count;
  }
  const int64_t size = tail.present ? size_with_tail(channels) : 2 * channels + 1;
  Tensor message = allocate_vector(size, ScalarType::Double, input);
  auto* values = static_cast<double*>(message.mutable_data_ptr());
  const auto count = static_cast<double>(before);
  dispatch_unfused<Message>(count, means.data(), m2s.data(), channels, values);
  write_tail(values, channels, count, tail);
  return {message};
}

}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("batch_norm_stats", &syncbn::boxed<syncbn::read_stats, syncbn::cpu::batch_norm_stats>);
}
