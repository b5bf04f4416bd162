// Walks over the slots of a channel in a planar tensor (outer, C, inner).
//
// A thread visits every blockDim.x-th slot of its block's segment, upwards or downwards; see
// plan.h.
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
  int64_t slots_in_plane;
  int64_t slots;        // of a channel
  int64_t segment;      // slots of a block
  int64_t step_planes;  // blockDim.x slots: whole planes, in values,
  int64_t step_slots;   // and slots
  int phase;            // of the first value: its distance from an aligned address, in values

  Planar(const Plan& plan, const void* pointer)
      : inner(plan.geometry.inner),
        channels(plan.geometry.channels),
        numel(plan.geometry.numel()),
        plane_stride(plan.geometry.channels * plan.geometry.inner),
        slots_in_plane(plan.slots_in_plane),
        slots(plan.geometry.outer * plan.slots_in_plane),
        segment(plan.segment),
        step_planes(plan.block_x / plan.slots_in_plane * plane_stride),
        step_slots(plan.block_x % plan.slots_in_plane),
        phase(static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kVectorBytes /
                               size_of(plan.dtype))) {}

  __device__ __forceinline__ int64_t first_slot() const { return blockIdx.y * segment; }
  // Slots of this block in each channel.
  __device__ __forceinline__ int num_slots() const {
    const int64_t left = slots - first_slot();
    return static_cast<int>(left < segment ? left : segment);
  }
  // Offset, but for the channel's, of the plane in which the block begins.
  __device__ __forceinline__ int64_t first_plane() const {
    return first_slot() / slots_in_plane * plane_stride;
  }
};

// The vector at `offset` of the tensor, and which of its values belong to the plane: bit v is value
// v. A mask, because the test of a bit is one instruction.
struct Slot {
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
class SlotWalk {
 public:
  // Starts at slot `first` of the channel.
  __device__ SlotWalk(const Planar& planar, int64_t channel, int64_t first)
      : planar_(planar),
        plane_(first / planar.slots_in_plane * planar.plane_stride + channel * planar.inner),
        slot_(first % planar.slots_in_plane) {}

  __device__ __forceinline__ Slot get() const {
    if (kAligned) {
      return {plane_ + slot_ * kVector, Slot::kFull<kVector>};
    }
    // The first slot begins before the plane, and the last ones may end behind it.
    const int phase = static_cast<unsigned int>(planar_.phase + plane_) % kVector;
    const int64_t from = slot_ * kVector - phase;
    const int64_t left = planar_.inner - from;
    unsigned int mask = Slot::kFull<kVector>;
    if (from < 0) {
      mask <<= phase;
    }
    if (left < kVector) {
      mask &= (1u << (left < 0 ? 0 : static_cast<int>(left))) - 1;
    }
    return {plane_ + from, mask & Slot::kFull<kVector>};
  }

  __device__ __forceinline__ void advance() {
    if (kDirection == Direction::kUp) {
      plane_ += planar_.step_planes;
      slot_ += planar_.step_slots;
      if (slot_ >= planar_.slots_in_plane) {
        slot_ -= planar_.slots_in_plane;
        plane_ += planar_.plane_stride;
      }
    } else {
      plane_ -= planar_.step_planes;
      slot_ -= planar_.step_slots;
      if (slot_ < 0) {
        slot_ += planar_.slots_in_plane;
        plane_ -= planar_.plane_stride;
      }
    }
  }

 private:
  const Planar& planar_;
  int64_t plane_;  // offset of the plane's first value
  int64_t slot_;
};

// Loads a slot. Values of other planes come along, but nothing outside of the tensor is touched.
template <int kVector, bool kAligned, Reuse kReuse, typename T>
__device__ __forceinline__ Vector<T, kVector> load_slot(const Planar& planar, const T* tensor,
                                                        const Slot& slot) {
  if (kAligned || (slot.offset >= 0 && slot.offset + kVector <= planar.numel)) {
    return load<kVector, kReuse>(tensor + slot.offset);
  }
  Vector<T, kVector> values{};
  if constexpr (!kAligned) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (slot.has<kAligned>(v)) {
        values.set(v, tensor[slot.offset + v]);
      }
    }
  }
  return values;
}

template <int kVector, bool kAligned, typename T>
__device__ __forceinline__ void store_slot(T* tensor, const Slot& slot,
                                           const Vector<T, kVector>& values) {
  if (kAligned || slot.mask == Slot::kFull<kVector>) {
    store(tensor + slot.offset, values);
    return;
  }
  if constexpr (!kAligned) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (slot.has<kAligned>(v)) {
        tensor[slot.offset + v] = values.get(v);
      }
    }
  }
}

}  // namespace syncbn::cuda
