// A planar tensor (outer, C, inner): a thread visits every blockDim.x-th aligned vector of its
// block's chunks; see plan.h.
#pragma once

#include "chunks.h"
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
  int64_t step_planes;   // blockDim.x vectors: whole planes, in values,
  int64_t step_vectors;  // and vectors
  Chunks chunks;         // of a channel's vectors
  int64_t jump_planes;   // from the end of a chunk to the block's next, in the same way
  int64_t jump_vectors;
  int phase;  // of the first value: its distance from an aligned address, in values

  // A thread has `steps` vectors of a chunk.
  Planar(const Plan& plan, const void* pointer, int steps)
      : inner(plan.geometry.inner),
        channels(plan.geometry.channels),
        numel(plan.geometry.numel()),
        plane_stride(plan.geometry.channels * plan.geometry.inner),
        vectors_in_plane(plan.vectors_in_plane),
        step_planes(plan.block_x / plan.vectors_in_plane * plane_stride),
        step_vectors(plan.block_x % plan.vectors_in_plane),
        chunks(plan.geometry.outer * plan.vectors_in_plane, steps * plan.block_x),
        jump_planes(jump(plan) / plan.vectors_in_plane * plane_stride),
        jump_vectors(jump(plan) % plan.vectors_in_plane),
        phase(static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kVectorBytes /
                               size_of(plan.dtype))) {}

 private:
  int64_t jump(const Plan& plan) const {
    return (plan.kind.direction == Direction::kUp ? plan.splits - 1 : plan.splits + 1) *
           chunks.size;
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

// The walk of a thread over its vectors of a channel: upwards in a chunk, then to the next chunk.
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

  __device__ __forceinline__ void advance() { move_up(planar_.step_planes, planar_.step_vectors); }

  // From the end of a chunk: behind all of the thread's steps, also the steps of no vectors.
  __device__ __forceinline__ void next_chunk() {
    if (kDirection == Direction::kUp) {
      move_up(planar_.jump_planes, planar_.jump_vectors);
      return;
    }
    plane_ -= planar_.jump_planes;
    vector_ -= planar_.jump_vectors;
    if (vector_ < 0) {
      vector_ += planar_.vectors_in_plane;
      plane_ -= planar_.plane_stride;
    }
  }

 private:
  const Planar& planar_;
  int64_t plane_;  // offset of the plane's first value
  int64_t vector_;

  __device__ __forceinline__ void move_up(int64_t planes, int64_t vectors) {
    plane_ += planes;
    vector_ += vectors;
    if (vector_ >= planar_.vectors_in_plane) {
      vector_ -= planar_.vectors_in_plane;
      plane_ += planar_.plane_stride;
    }
  }
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
