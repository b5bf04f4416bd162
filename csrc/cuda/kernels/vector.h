// Vectors: a few neighboring values of a tensor, which are loaded and stored at once. Computations
// are in float32, for float64 tensors in float64.
#pragma once

#include <cstring>
#include <type_traits>

#include "device.h"
#include "plan.h"

namespace syncbn::cuda {

// torch compiles CUDA without the implicit conversions of the 16-bit types.
__device__ __forceinline__ float to_compute(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_compute(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_compute(float value) { return value; }
__device__ __forceinline__ double to_compute(double value) { return value; }

template <typename T>
__device__ __forceinline__ T from_compute(compute_t<T> value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

template <int kBytes>
using word_t = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, unsigned int, unsigned short>>>;

template <typename T, int kVector>
struct Vector {
  using Word = word_t<sizeof(T) * kVector>;
  Word word;

  __device__ __forceinline__ T get(int i) const {
    T value;
    memcpy(&value, reinterpret_cast<const char*>(&word) + i * sizeof(T), sizeof(T));
    return value;
  }

  __device__ __forceinline__ void set(int i, T value) {
    memcpy(reinterpret_cast<char*>(&word) + i * sizeof(T), &value, sizeof(T));
  }

  __device__ __forceinline__ compute_t<T> operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && kVector > 1) {
      // A bfloat16 is the upper half of a float: one instruction, where get() takes two.
      unsigned int bits;
      memcpy(&bits, reinterpret_cast<const char*>(&word) + i / 2 * sizeof(bits), sizeof(bits));
      bits = i % 2 == 0 ? bits << 16 : bits & 0xffff0000u;
      float value;
      memcpy(&value, &bits, sizeof(value));
      return value;
    } else {
      return to_compute(get(i));
    }
  }
};

enum class Reuse { kSoon, kNever };  // kNever: the line is the first to leave the cache

template <int kVector, Reuse kReuse, typename T>
__device__ __forceinline__ Vector<T, kVector> load(const T* pointer) {
  using Word = typename Vector<T, kVector>::Word;
  SYNCBN_CHECK_ACCESS(pointer, sizeof(Word));
  const auto* word = reinterpret_cast<const Word*>(pointer);
  return {kReuse == Reuse::kNever ? __ldcs(word) : *word};
}

template <typename T, int kVector>
__device__ __forceinline__ void store(T* pointer, const Vector<T, kVector>& values) {
  using Word = typename Vector<T, kVector>::Word;
  SYNCBN_CHECK_ACCESS(pointer, sizeof(Word));
  *reinterpret_cast<Word*>(pointer) = values.word;
}

}  // namespace syncbn::cuda
