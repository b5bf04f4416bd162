// verify_sums for CUDA tensors: launches kernels/verify_sums.cu on the current stream.

#include "../common/operators.h"
#include "adapter.h"

namespace syncbn::cuda {
namespace {

VerifyResults verify_sums(const VerifyArguments& a) {
  const int64_t size = check_verify(a);
  const Device device(a.sums);
  Tensor verified = allocate_vector(size, ScalarType::Double, a.sums);
  launch_verify_sums(device.stream(), static_cast<const double*>(a.sums.const_data_ptr()), size,
                     Verifier{a.expectation, to_status(a.status)},
                     Expectation{a.other_tail_sum.has_value(), a.other_tail_sum.value_or(0)},
                     static_cast<double*>(verified.mutable_data_ptr()));
  return {verified};
}

}  // namespace
}  // namespace syncbn::cuda

STABLE_TORCH_LIBRARY_IMPL(syncbn, CUDA, m) {
  m.impl("verify_sums", &syncbn::boxed<syncbn::read_verify, syncbn::cuda::verify_sums>);
}
