// Functions that the host's compiler and nvcc share.
#pragma once

#if defined(__CUDACC__)
#define SYNCBN_HOST_DEVICE __host__ __device__
#else
#define SYNCBN_HOST_DEVICE
#endif

#define SYNCBN_INLINE __attribute__((always_inline)) inline

namespace syncbn {

// a * b, rounded. Fused with a sum, the product would have other bits when the message is written
// than when it is read. On x86-64 CPU operators call it from unfused code (dispatch_unfused).
SYNCBN_HOST_DEVICE inline double rounded_product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#elif defined(__x86_64__) && !defined(__FMA__)
  return a * b;
#else
  double product = a * b;
  asm("" : "+m"(product));  // hides the multiplication from the following addition
  return product;
#endif
}

}  // namespace syncbn
