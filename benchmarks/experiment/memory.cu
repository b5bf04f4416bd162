// Memory patterns of element-wise kernels and reductions, one at a time: orders of blocks, policies
// of loads and stores, bytes in flight. patterns.py has the list.
//
// y = 2a + 1 or, with two inputs, y = 2a + b, in float32. Without an output the values are added
// up. Each thread has kVectors vectors of each input in flight, a block a chunk of them.
#include <cuda_runtime.h>

#include <cstdint>

constexpr int kThreads = 256;

enum class Order {
  kFlat,
  kDealtUp,
  kDealtDown,
  kSegmentsUp,
  kSegmentsDown,
  kPlanesUp,
  kPlanesDown,
  kDealtPlanesUp,
  kDealtPlanesDown
};
enum class Loads { kPlain, kEvictFirst, kNoAllocate, k128Bytes };
enum class Stores { kPlain, kEvictFirst, kWriteThrough };

__host__ __device__ constexpr bool is_down(Order order) {
  return order == Order::kDealtDown || order == Order::kSegmentsDown ||
         order == Order::kPlanesDown || order == Order::kDealtPlanesDown;
}
// Blocks have segments of neighboring chunks.
__host__ __device__ constexpr bool is_segmented(Order order) {
  return order == Order::kSegmentsUp || order == Order::kSegmentsDown ||
         order == Order::kPlanesUp || order == Order::kPlanesDown;
}
// Blocks share a channel, not the tensor.
__host__ __device__ constexpr bool is_of_channel(Order order) { return order >= Order::kPlanesUp; }

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// memory.py has the same fields.
struct Tensors {
  const uint4* a;
  const uint4* b;
  uint4* y;
  int64_t vectors;   // of a tensor
  int64_t channels;  // the orders of a channel only,
  int64_t plane;     // in vectors, too
};

template <Loads kLoads>
__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 v;
  if constexpr (kLoads == Loads::kPlain) {
    v = *from;
  } else if constexpr (kLoads == Loads::kEvictFirst) {
    v = __ldcs(from);
  } else if constexpr (kLoads == Loads::kNoAllocate) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  } else {
    asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  }
  return v;
}

template <Stores kStores>
__device__ __forceinline__ void store(uint4* to, uint4 v) {
  if constexpr (kStores == Stores::kPlain) {
    *to = v;
  } else if constexpr (kStores == Stores::kEvictFirst) {
    __stcs(to, v);
  } else {
    __stwt(to, v);
  }
}

__device__ __forceinline__ unsigned compute(unsigned a, unsigned b) {
  return __float_as_uint(fmaf(2, __uint_as_float(a), __uint_as_float(b)));
}

template <int kReads, bool kWrites, int kVectors, int kBlocks, Order kOrder, Loads kLoads,
          Stores kStores>
__global__ void __launch_bounds__(kThreads, kBlocks) pattern_kernel(Tensors tensors) {
  constexpr int kChunk = kVectors * kThreads;
  const int64_t vectors =
      is_of_channel(kOrder) ? tensors.vectors / tensors.channels : tensors.vectors;
  const int64_t chunks = ceil_div(vectors, kChunk);
  const int64_t blocks = is_of_channel(kOrder) ? gridDim.y : gridDim.x;
  const int64_t block = is_of_channel(kOrder) ? blockIdx.y : blockIdx.x;
  const int64_t turns = ceil_div(chunks, blocks);
  // The place in the tensor of a vector of the channel; a channel has fewer than 2^32 vectors.
  const auto place = [&](int64_t vector) -> int64_t {
    if constexpr (is_of_channel(kOrder)) {
      const auto plane = static_cast<unsigned>(tensors.plane);
      const auto number = static_cast<unsigned>(vector);
      return (number / plane * tensors.channels + blockIdx.x) * plane + number % plane;
    }
    return vector;
  };
  const unsigned one = __float_as_uint(1);
  float sum = 0;
  for (int64_t turn = 0; turn < turns; ++turn) {
    int64_t chunk = is_segmented(kOrder) ? block * turns + turn : turn * blocks + block;
    if (chunk >= chunks) {
      break;
    }
    if (is_down(kOrder)) {
      chunk = chunks - 1 - chunk;
    }
    const int64_t first = chunk * kChunk + threadIdx.x;
    int64_t places[kVectors];
    uint4 a[kVectors];
    uint4 b[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (first + k * kThreads < vectors) {
        places[k] = place(first + k * kThreads);
        a[k] = load<kLoads>(tensors.a + places[k]);
        b[k] = kReads == 2 ? load<kLoads>(tensors.b + places[k]) : make_uint4(one, one, one, one);
      }
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (first + k * kThreads < vectors) {
        const uint4 y = make_uint4(compute(a[k].x, b[k].x), compute(a[k].y, b[k].y),
                                   compute(a[k].z, b[k].z), compute(a[k].w, b[k].w));
        if constexpr (kWrites) {
          store<kStores>(tensors.y + places[k], y);
        } else {
          sum += __uint_as_float(y.x) + __uint_as_float(y.y) + __uint_as_float(y.z) +
                 __uint_as_float(y.w);
        }
      }
    }
  }
  if (!kWrites && sum == 12345.678f) {  // or the loads would be left out
    tensors.y[0] = make_uint4(one, one, one, one);
  }
}

// `blocks` share the tensor or, in the orders of a channel, each channel.
template <int kReads, bool kWrites, int kVectors, int kBlocks, Order kOrder, Loads kLoads,
          Stores kStores>
int launch(cudaStream_t stream, const Tensors& tensors, int64_t blocks) {
  const int64_t channels = is_of_channel(kOrder) ? tensors.channels : 1;
  const int64_t chunks = ceil_div(tensors.vectors / channels, int64_t{kVectors} * kThreads);
  const auto number =
      static_cast<unsigned>(kOrder == Order::kFlat || blocks > chunks ? chunks : blocks);
  const dim3 grid =
      is_of_channel(kOrder) ? dim3(static_cast<unsigned>(channels), number) : dim3(number);
  pattern_kernel<kReads, kWrites, kVectors, kBlocks, kOrder, kLoads, kStores>
      <<<grid, kThreads, 0, stream>>>(tensors);
  return cudaGetLastError();
}

__global__ void empty_kernel() {}

// Holds a whole multiprocessor for some time, as NCCL's kernels do while gradients are added up.
__global__ void busy_kernel(int64_t nanoseconds) {
  const auto now = [] {
    int64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
  };
  for (const int64_t begin = now(); now() - begin < nanoseconds;) {
    __nanosleep(2000);
  }
}

// The functions return CUDA's errors.
extern "C" int run_pattern(int number, cudaStream_t stream, Tensors tensors, int64_t blocks) {
  switch (number) {
#define INSTANCE(number, ...) \
  case number:                \
    return launch<__VA_ARGS__>(stream, tensors, blocks);
#include "instances.inc"
    default:
      return cudaErrorInvalidValue;
  }
}

extern "C" int run_empty(cudaStream_t stream) {
  empty_kernel<<<1, 32, 0, stream>>>();
  return cudaGetLastError();
}

// All shared memory is taken: no other block fits beside it.
extern "C" int run_busy(cudaStream_t stream, int multiprocessors, int64_t nanoseconds) {
  int device = 0;
  int bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncSetAttribute(busy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  busy_kernel<<<multiprocessors, 32, bytes, stream>>>(nanoseconds);
  return cudaGetLastError();
}
