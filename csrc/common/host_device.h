// Functions that the host's compiler and nvcc share. Includes no torch header.
#pragma once

#if defined(__CUDACC__)
#define SYNCBN_HOST_DEVICE __host__ __device__
#else
#define SYNCBN_HOST_DEVICE
#endif

#define SYNCBN_INLINE __attribute__((always_inline)) inline

namespace syncbn {

// a * b, rounded. A compiler that fused it with a sum would round what is written to the message
// and what is read from it differently. On x86-64 the CPU operators run this unfused (simd.h).
SYNCBN_HOST_DEVICE inline double rounded_product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#elif defined(__x86_64__) && !defined(__FMA__)
  return a * b;
#else
  double product = a * b;
  asm("" : "+m"(product));  // what follows does not see the multiplication
  return product;
#endif
}

}  // namespace syncbn
