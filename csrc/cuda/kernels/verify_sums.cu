// verify_sums on CUDA: copies the sums without their tail, or writes NaN if they are inconsistent.

#include "device.h"
#include "launchers.h"

namespace syncbn::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void verify_sums_kernel(const double* sums, int64_t size, Verifier verifier,
                                   Expectation other, double* verified) {
  const double* count = sums + size - 1;
  Status status = read_status(count, verifier.expectation);
  if (status == Status::kDisagreement && other.present) {
    status = read_status(count, other);
  }
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size) {
    verified[i] = status == Status::kConsistent ? sums[i] : NAN;
  }
  if (i == 0) {
    verifier.write(status);
  }
}

}  // namespace

void launch_verify_sums(void* stream, const double* sums, int64_t size, Verifier verifier,
                        Expectation other, double* verified) {
  const auto num_blocks = static_cast<unsigned>((size + kThreads - 1) / kThreads);
  launch(verify_sums_kernel, dim3(num_blocks), dim3(kThreads), 0, static_cast<cudaStream_t>(stream),
         sums, size, verifier, other, verified);
}

}  // namespace syncbn::cuda
