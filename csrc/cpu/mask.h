// Masks: a byte for each position of the input, 0 if the position is masked.
//
// The loops over planes and rows know no mask, so that no loop is compiled twice. Sums read chunks
// of the tensors, which are copied with fill values at masked positions (masked_sums.h). Outputs
// are computed in chunks, and masked positions are set to zero afterwards (masked_output.h). Chunks
// stay in the caches: each tensor is still read or written once.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "partition.h"
#include "simd.h"

namespace syncbn::cpu {

constexpr int64_t kChunkValues = 4096;  // of each tensor in a chunk: the caches hold all of them

namespace detail {

// Values are copied as bits.
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
    const Bits<T> value = in[i];  // always read: a loop without branches
    out[i] = mask[i] != 0 ? value : fill(i);
  }
}

template <typename T>
SYNCBN_INLINE Bits<T> bits_of(const T& value) {
  Bits<T> bits;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

// Copies without a call of memcpy, which would take as long as a short row.
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

// Repeats the mask of a row's `inner` positions for each of its channels.
SYNCBN_INLINE void repeat_mask(const uint8_t* mask, int64_t inner, int64_t width, uint8_t* lanes) {
  std::memcpy(lanes, mask, inner);
  for (int64_t done = inner; done < width;) {
    const int64_t next = std::min(done, width - done);
    std::memcpy(lanes + done, lanes, next);
    done += next;
  }
}

}  // namespace detail

// Copies `count` values of one channel from position `begin` on, with `fill` at masked positions.
// `mask` begins at position 0.
template <typename T>
struct SelectPlanes {
  template <typename Isa>
  static SYNCBN_INLINE void run(const T* tensor, const uint8_t* mask, const Geometry* geometry,
                                int64_t channel, int64_t begin, int64_t count, T fill, T* to) {
    const auto bits = detail::bits_of(fill);
    const uint8_t* position = mask + begin;
    for (Spans spans(*geometry, channel, begin, count); spans.left > 0; spans.next()) {
      const int64_t n = spans.length();
      detail::select(tensor + spans.offset, position, [=](int64_t) { return bits; }, n, to);
      position += n;
      to += n;
    }
  }
};

// Copies rows of `width` values at distances of `stride`, with `fills`, a value for each column, at
// masked positions. `mask` begins at the first row; `lanes` is memory for one row's mask. With
// inner == 1 masked rows are skipped. `copied` is the number of copied rows.
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

// Sets values at masked positions to zero: `values` are `count` values of a tensor from index
// `begin` on.
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
      const uint8_t* position = mask + plane / geometry->channels * inner + within;
      detail::select(values + done, position, [](int64_t) { return 0; }, n, values + done);
      done += n;
    }
  }
};

// The same for whole rows. `mask` begins at the first row.
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

struct CountUnmasked {
  template <typename Isa>
  static SYNCBN_INLINE void run(const uint8_t* mask, int64_t count, int64_t* positions) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      sum += mask[i] != 0;
    }
    *positions = sum;
  }
};

struct MaskedSegment {
  const uint8_t* mask = nullptr;                  // of the tensor, from position 0 on
  int64_t count = 0;                              // unmasked positions of the segment
  std::array<int64_t, kMaxSamples> samples = {};  // some of them, counted from the tensor's start
};

inline MaskedSegment find_segment(const uint8_t* mask, int64_t begin, int64_t length, int samples) {
  constexpr int64_t kBlock = 1024;
  MaskedSegment segment{mask};
  std::vector<int64_t> of_block(ceil_div(length, kBlock));
  for (size_t block = 0; block < of_block.size(); ++block) {
    const int64_t first = static_cast<int64_t>(block) * kBlock;
    dispatch_isa<CountUnmasked>(mask + begin + first, std::min(kBlock, length - first),
                                &of_block[block]);
    segment.count += of_block[block];
  }
  size_t block = 0;
  int64_t before = 0;  // unmasked positions before the block
  for (int i = 0; i < samples && segment.count > 0; ++i) {
    const int64_t rank = sample_position(i, samples, segment.count);
    while (before + of_block[block] <= rank) {
      before += of_block[block++];
    }
    int64_t position = begin + static_cast<int64_t>(block) * kBlock;
    for (int64_t left = rank - before; left > 0 || mask[position] == 0; ++position) {
      left -= mask[position] != 0;
    }
    segment.samples[i] = position;
  }
  return segment;
}

inline std::vector<MaskedSegment> find_segments(const uint8_t* mask, const Geometry& geometry,
                                                const Partition& partition, int samples) {
  std::vector<MaskedSegment> segments(partition.segments);
  const int64_t positions = positions_of_segment(geometry, partition, 0);
  for (int64_t i = 0; i < partition.segments; ++i) {
    segments[i] =
        find_segment(mask, i * positions, positions_of_segment(geometry, partition, i), samples);
  }
  return segments;
}

}  // namespace syncbn::cpu
