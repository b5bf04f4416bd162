// Element-wise operators with a mask: see mask.h.
#pragma once

#include <memory>

#include "elementwise_job.h"
#include "mask.h"

namespace syncbn::cpu {

// Copies with stores that bypass the caches, except to lines that are written in part.
template <typename T>
struct StreamCopy {
  template <typename Isa>
  static SYNCBN_INLINE void run(const T* from, int64_t count, T* to) {
    using Vector = typename Words<Isa>::Vector;
    const auto* in = reinterpret_cast<const char*>(from);
    auto* out = reinterpret_cast<char*>(to);
    const auto bytes = static_cast<int64_t>(count * sizeof(T));
    const auto before = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) % kLine);
    const int64_t head = std::min(before, bytes);
    const int64_t end = head + (bytes - head) / kLine * kLine;
    std::memcpy(out, in, head);
    for (int64_t i = head; i < end; i += Isa::kVectorBytes) {
      Vector vector;
      std::memcpy(&vector, in + i, sizeof(vector));
      detail::stream_vector(vector, out + i);
    }
    std::memcpy(out + end, in + end, bytes - end);
  }
};

// Computes the values from `begin` to `end` in chunks of `chunk` values: compute(job, at, count)
// computes a chunk, clear(values, at, count) sets its masked positions to zero.
template <template <typename> class Formula, typename T, typename Compute, typename Clear>
void compute_masked(const ElementwiseJob<Formula, T>& job, int64_t begin, int64_t end,
                    int64_t chunk, const Compute& compute, const Clear& clear) {
  ElementwiseJob<Formula, T> part = job;
  part.stream = false;
  const std::unique_ptr<T[]> memory(job.stream ? new T[chunk] : nullptr);
  for (int64_t at = begin; at < end; at += chunk) {
    const int64_t count = std::min(chunk, end - at);
    T* values = job.output + at;
    if (job.stream) {
      values = memory.get();
      part.output = values - at;
    }
    compute(part, at, count);
    clear(values, at, count);
    if (job.stream) {
      dispatch_isa<StreamCopy<T>>(values, count, job.output + at);
    }
  }
  if (job.stream) {
    finish_streaming();
  }
}

}  // namespace syncbn::cpu
