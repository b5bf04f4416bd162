// The part of CUDA that kernels may use, for a host compiler: g++ -x c++ -I tests/emulation x.cu.
// grid.h describes how kernels run and which faults are found. Barriers, shuffles and votes are of
// whole warps.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float16.h"
#include "grid.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

using cudaStream_t = void*;

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace syncbn::cuda {

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
            Args... args) {
  emulation::run_grid(grid, block, shared_bytes, [&] { kernel(args...); });
}

template <typename T>
T& shared_memory() {
  static_assert(alignof(T) <= 16);
  return *static_cast<T*>(emulation::Block::current->shared(sizeof(T)));
}

}  // namespace syncbn::cuda

// --- Barriers, shuffles, votes

inline void __syncthreads() { emulation::Block::current->suspend(emulation::Wait::kSyncthreads); }

namespace emulation {

// Offers `value` to the warp and returns the value of the lane `source(own lane)`, if it is in the
// own section of `width` lanes, or the own value.
template <typename T, typename Source>
T shuffle(Wait wait, unsigned mask, T value, int width, const Source& source) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const uint64_t* values = Block::current->exchange(wait, mask, bits, sizeof(T));
  const unsigned own = lane(), section = own / width * width;
  const unsigned from = source(own - section);
  std::memcpy(&value, &values[from < static_cast<unsigned>(width) ? section + from : own],
              sizeof(T));
  return value;
}

}  // namespace emulation

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emulation::shuffle(emulation::Wait::kShfl, mask, value, width,
                            [=](unsigned) { return source & (width - 1); });
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emulation::shuffle(emulation::Wait::kShflDown, mask, value, width,
                            [=](unsigned lane) { return lane + delta; });
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return emulation::shuffle(emulation::Wait::kShflXor, mask, value, width,
                            [=](unsigned lane) { return lane ^ lane_mask; });
}

inline void __syncwarp(unsigned mask = 0xffffffff) {
  emulation::Block::current->exchange(emulation::Wait::kSyncwarp, mask, 0, 0);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* values =
      emulation::Block::current->exchange(emulation::Wait::kBallot, mask, predicate != 0, 0);
  unsigned result = 0;
  for (unsigned lane = 0; lane < emulation::kWarpSize; ++lane) {
    result |= static_cast<unsigned>(values[lane]) << lane;
  }
  return result;
}

inline int __any_sync(unsigned mask, int predicate) {
  const uint64_t* values =
      emulation::Block::current->exchange(emulation::Wait::kAny, mask, predicate != 0, 0);
  return std::any_of(values, values + emulation::kWarpSize,
                     [](uint64_t value) { return value != 0; });
}

// --- Memory

namespace emulation {

inline void check_access(const volatile void* pointer, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % bytes != 0) {
    std::ostringstream what;
    what << "accesses " << bytes << " bytes at 0x" << std::hex << address
         << ", which is not aligned to them";
    Block::current->fail_thread(what.str());
  }
}

}  // namespace emulation

#define SYNCBN_CHECK_ACCESS(pointer, bytes) emulation::check_access(pointer, bytes)

template <typename T>
T __ldcs(const T* pointer) {
  SYNCBN_CHECK_ACCESS(pointer, sizeof(T));
  return *pointer;
}

inline void __threadfence() { emulation::Block::current->fence(); }

namespace emulation {

// An atomic operation signals other blocks. On a GPU, without a fence, they may see the signal
// before earlier stores; here they get a turn right after the signal.
template <typename T, typename Update>
T atomic(T* pointer, const Update& update) {
  static_assert(std::is_integral_v<T>, "the order of floating-point additions would vary");
  const T old = *pointer;
  *pointer = update(old);
  Block::current->signal();
  return old;
}

}  // namespace emulation

template <typename T>
T atomicAdd(T* pointer, T value) {
  return emulation::atomic(pointer, [=](T old) { return old + value; });
}

inline unsigned atomicInc(unsigned* pointer, unsigned limit) {
  return emulation::atomic(pointer, [=](unsigned old) { return old >= limit ? 0u : old + 1; });
}

// --- Arithmetic

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
