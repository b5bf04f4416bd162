// Masks: a byte for each place of the input, 0 where the place does not count.
//
// The loops over planes and rows know no mask. Sums are of pieces of the tensors, copied with other
// values at masked places (masked_sums.h); outputs are computed in pieces, whose masked places are
// set to zero afterwards (masked_output.h). The pieces stay in the caches, so that each tensor is
// still read or written once, and no loop is compiled twice.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "partition.h"
#include "simd.h"

namespace syncbn::cpu {

namespace detail {

// The bits of a value, which are copied whatever they mean.
template <size_t kBytes>
struct BitsOfSize;
template <>
struct BitsOfSize<2> {
  typedef uint16_t Type __attribute__((may_alias));
};
template <>
struct BitsOfSize<4> {
  typedef uint32_t Type __attribute__((may_alias));
};
template <>
struct BitsOfSize<8> {
  typedef uint64_t Type __attribute__((may_alias));
};
template <typename T>
using Bits = typename BitsOfSize<sizeof(T)>::Type;

// to[i] = mask[i] ? from[i] : fill(i). `to` may be `from`.
template <typename T, typename Fill>
SYNCBN_INLINE void select(const T* from, const uint8_t* mask, const Fill& fill, int64_t count,
                          T* to) {
  const auto* in = reinterpret_cast<const Bits<T>*>(from);
  auto* out = reinterpret_cast<Bits<T>*>(to);
  SYNCBN_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const Bits<T> value = in[i];  // read in any case: a loop without branches
    out[i] = mask[i] != 0 ? value : fill(i);
  }
}

template <typename T>
SYNCBN_INLINE Bits<T> bits_of(const T& value) {
  Bits<T> bits;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

// Copies without the call that a copy of unknown length is: it takes as long as a short row.
template <typename Isa, typename T>
SYNCBN_INLINE void copy(const T* from, int64_t count, T* to) {
  constexpr int64_t kVector = Isa::kVectorBytes / sizeof(T);
  if (count < kVector) {
    std::memcpy(static_cast<void*>(to), from, count * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < count; i += kVector) {
    const int64_t at = std::min(i, count - kVector);
    std::memcpy(static_cast<void*>(to + at), from + at, Isa::kVectorBytes);
  }
}

// Fills `lanes` with the bytes of a mask, again and again: a row's channels share its places.
SYNCBN_INLINE void repeat_mask(const uint8_t* mask, int64_t inner, int64_t width, uint8_t* lanes) {
  std::memcpy(lanes, mask, inner);
  for (int64_t done = inner; done < width;) {
    const int64_t next = std::min(done, width - done);
    std::memcpy(lanes + done, lanes, next);
    done += next;
  }
}

}  // namespace detail

// Copies `count` values of one channel from position `begin` on, those of masked places as `fill`.
// `mask` is that of the tensor.
template <typename T>
struct SelectPlanes {
  template <typename Isa>
  static SYNCBN_INLINE void run(const T* tensor, const uint8_t* mask, const Geometry* geometry,
                                int64_t channel, int64_t begin, int64_t count, T fill, T* to) {
    const auto bits = detail::bits_of(fill);
    const uint8_t* place = mask + begin;
    for (Spans spans(*geometry, channel, begin, count); spans.left > 0; spans.next()) {
      const int64_t n = spans.length();
      detail::select(tensor + spans.offset, place, [=](int64_t) { return bits; }, n, to);
      place += n;
      to += n;
    }
  }
};

// Copies rows of `width` values that lie `stride` apart, masked places as `fills` has them, a value
// for each column. `mask` is that of the first row, `lanes` memory for a row's. Rows of one place
// are left out where it is masked; `copied` is the number of the others.
template <typename T>
struct SelectRows {
  template <typename Isa>
  static SYNCBN_INLINE void run(const T* from, int64_t stride, int64_t width, int64_t inner,
                                const uint8_t* mask, int64_t rows, const T* fills, uint8_t* lanes,
                                T* to, int64_t* copied) {
    const auto* fill_bits = reinterpret_cast<const detail::Bits<T>*>(fills);
    const T* const begin = to;
    for (int64_t row = 0; row < rows; ++row, from += stride, mask += inner) {
      if (inner > 1) {
        detail::repeat_mask(mask, inner, width, lanes);
        detail::select(from, lanes, [=](int64_t i) { return fill_bits[i]; }, width, to);
        to += width;
      } else if (*mask != 0) {
        detail::copy<Isa>(from, width, to);
        to += width;
      }
    }
    *copied = (to - begin) / width;
  }
};

// Sets the masked places among `count` values to zero, which are those of a tensor from `begin` on.
template <typename T>
struct ClearPlanes {
  template <typename Isa>
  static SYNCBN_INLINE void run(T* values, const uint8_t* mask, const Geometry* geometry,
                                int64_t begin, int64_t count) {
    const int64_t inner = geometry->inner;
    for (int64_t done = 0; done < count;) {
      const int64_t plane = (begin + done) / inner;
      const int64_t within = (begin + done) % inner;
      const int64_t n = std::min(inner - within, count - done);
      const uint8_t* place = mask + plane / geometry->channels * inner + within;
      detail::select(values + done, place, [](int64_t) { return 0; }, n, values + done);
      done += n;
    }
  }
};

// The same of whole rows, of which `mask` is that of the first.
template <typename T>
struct ClearRows {
  template <typename Isa>
  static SYNCBN_INLINE void run(T* values, const uint8_t* mask, const Geometry* geometry,
                                int64_t rows, uint8_t* lanes) {
    const int64_t width = geometry->channels * geometry->inner;
    for (int64_t row = 0; row < rows; ++row, values += width, mask += geometry->inner) {
      if (geometry->inner == 1) {
        if (*mask == 0) {
          std::memset(static_cast<void*>(values), 0, width * sizeof(T));
        }
        continue;
      }
      detail::repeat_mask(mask, geometry->inner, width, lanes);
      detail::select(values, lanes, [](int64_t) { return 0; }, width, values);
    }
  }
};

// The number of places that count among `count` of them.
struct CountPlaces {
  template <typename Isa>
  static SYNCBN_INLINE void run(const uint8_t* mask, int64_t count, int64_t* places) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      sum += mask[i] != 0;
    }
    *places = sum;
  }
};

// What a mask leaves of a segment: the number of its places that count, and where samples of them
// are, as places of the tensor.
struct MaskedSegment {
  const uint8_t* mask = nullptr;  // of the tensor
  int64_t count = 0;
  std::array<int64_t, kMaxSamples> samples = {};
};

inline MaskedSegment find_segment(const uint8_t* mask, int64_t begin, int64_t length, int samples) {
  constexpr int64_t kBlock = 1024;
  MaskedSegment segment{mask};
  std::vector<int64_t> of_block(ceil_div(length, kBlock));
  for (size_t block = 0; block < of_block.size(); ++block) {
    const int64_t first = static_cast<int64_t>(block) * kBlock;
    dispatch_isa<CountPlaces>(mask + begin + first, std::min(kBlock, length - first),
                              &of_block[block]);
    segment.count += of_block[block];
  }
  size_t block = 0;
  int64_t before = 0;  // places that count in front of the block
  for (int i = 0; i < samples && segment.count > 0; ++i) {
    const int64_t rank = sample_position(i, samples, segment.count);
    while (before + of_block[block] <= rank) {
      before += of_block[block++];
    }
    int64_t place = begin + static_cast<int64_t>(block) * kBlock;
    for (int64_t left = rank - before; left > 0 || mask[place] == 0; ++place) {
      left -= mask[place] != 0;
    }
    segment.samples[i] = place;
  }
  return segment;
}

// Those of a partition.
inline std::vector<MaskedSegment> find_segments(const uint8_t* mask, const Geometry& geometry,
                                                const Partition& partition, int samples) {
  std::vector<MaskedSegment> segments(partition.segments);
  const int64_t places = places_of_segment(geometry, partition, 0);
  for (int64_t i = 0; i < partition.segments; ++i) {
    segments[i] =
        find_segment(mask, i * places, places_of_segment(geometry, partition, i), samples);
  }
  return segments;
}

}  // namespace syncbn::cpu
