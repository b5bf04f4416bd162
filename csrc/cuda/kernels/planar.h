// A planar tensor (outer, C, inner): a thread visits every blockDim.x-th aligned vector of its
// block's segment, upwards or downwards; see plan.h.
#pragma once

#include "plan.h"
#include "vector.h"

namespace syncbn::cuda {

// A plan as kernels see it.
struct Planar {
  int64_t inner;
  int64_t channels;
  int64_t numel;
  int64_t plane_stride;  // from a plane to the channel's next, in values
  int64_t vectors_in_plane;
  int64_t vectors;       // of a channel
  int64_t segment;       // vectors of a block
  int64_t step_planes;   // blockDim.x vectors: whole planes, in values,
  int64_t step_vectors;  // and vectors
  int phase;             // of the first value: its distance from an aligned address, in values

  Planar(const Plan& plan, const void* pointer)
      : inner(plan.geometry.inner),
        channels(plan.geometry.channels),
        numel(plan.geometry.numel()),
        plane_stride(plan.geometry.channels * plan.geometry.inner),
        vectors_in_plane(plan.vectors_in_plane),
        vectors(plan.geometry.outer * plan.vectors_in_plane),
        segment(plan.segment),
        step_planes(plan.block_x / plan.vectors_in_plane * plane_stride),
        step_vectors(plan.block_x % plan.vectors_in_plane),
        phase(static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kVectorBytes /
                               size_of(plan.dtype))) {}

  __device__ __forceinline__ int64_t first_vector() const { return blockIdx.y * segment; }
  // The number of this block's vectors in each channel.
  __device__ __forceinline__ int num_vectors() const {
    const int64_t left = vectors - first_vector();
    return static_cast<int>(left < segment ? left : segment);
  }
  // The offset of the block's first plane, without the channel's offset.
  __device__ __forceinline__ int64_t first_plane() const {
    return first_vector() / vectors_in_plane * plane_stride;
  }
};

// The aligned vector at `offset` of the tensor. Bit v of the mask is set if value v belongs to the
// plane: the test of a bit is one instruction.
struct AlignedVector {
  int64_t offset;
  unsigned int mask;

  template <int kVector>
  static constexpr unsigned int kFull = (1u << kVector) - 1;

  template <bool kAligned>
  __device__ __forceinline__ bool has(int v) const {
    return kAligned ? mask != 0 : (mask & (1u << v)) != 0;
  }
};

enum class Direction { kUp, kDown };

template <int kVector, bool kAligned, Direction kDirection>
class VectorWalk {
 public:
  // Starts at vector number `first` of the channel.
  __device__ VectorWalk(const Planar& planar, int64_t channel, int64_t first)
      : planar_(planar),
        plane_(first / planar.vectors_in_plane * planar.plane_stride + channel * planar.inner),
        vector_(first % planar.vectors_in_plane) {}

  __device__ __forceinline__ AlignedVector get() const {
    if (kAligned) {
      return {plane_ + vector_ * kVector, AlignedVector::kFull<kVector>};
    }
    // The first vector begins before the plane, and the last ones may end after it.
    const int phase = static_cast<unsigned int>(planar_.phase + plane_) % kVector;
    const int64_t from = vector_ * kVector - phase;
    const int64_t left = planar_.inner - from;
    unsigned int mask = AlignedVector::kFull<kVector>;
    if (from < 0) {
      mask <<= phase;
    }
    if (left < kVector) {
      mask &= (1u << (left < 0 ? 0 : static_cast<int>(left))) - 1;
    }
    return {plane_ + from, mask & AlignedVector::kFull<kVector>};
  }

  __device__ __forceinline__ void advance() {
    if (kDirection == Direction::kUp) {
      plane_ += planar_.step_planes;
      vector_ += planar_.step_vectors;
      if (vector_ >= planar_.vectors_in_plane) {
        vector_ -= planar_.vectors_in_plane;
        plane_ += planar_.plane_stride;
      }
    } else {
      plane_ -= planar_.step_planes;
      vector_ -= planar_.step_vectors;
      if (vector_ < 0) {
        vector_ += planar_.vectors_in_plane;
        plane_ -= planar_.plane_stride;
      }
    }
  }

 private:
  const Planar& planar_;
  int64_t plane_;  // offset of the plane's first value
  int64_t vector_;
};

// Loads a vector, with values of other planes, but never memory outside of the tensor.
template <int kVector, bool kAligned, Reuse kReuse, typename T>
__device__ __forceinline__ Vector<T, kVector> load_vector(const Planar& planar, const T* tensor,
                                                          const AlignedVector& vector) {
  if (kAligned || (vector.offset >= 0 && vector.offset + kVector <= planar.numel)) {
    return load<kVector, kReuse>(tensor + vector.offset);
  }
  Vector<T, kVector> values{};
  if constexpr (!kAligned) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (vector.has<kAligned>(v)) {
        values.set(v, tensor[vector.offset + v]);
      }
    }
  }
  return values;
}

template <int kVector, bool kAligned, typename T>
__device__ __forceinline__ void store_vector(T* tensor, const AlignedVector& vector,
                                             const Vector<T, kVector>& values) {
  if (kAligned || vector.mask == AlignedVector::kFull<kVector>) {
    store(tensor + vector.offset, values);
    return;
  }
  if constexpr (!kAligned) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (vector.has<kAligned>(v)) {
        tensor[vector.offset + v] = values.get(v);
      }
    }
  }
}

}  // namespace syncbn::cuda
