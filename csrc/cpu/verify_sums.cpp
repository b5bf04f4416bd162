// verify_sums on the CPU.

#include "../common/operators.h"

namespace syncbn::cpu {
namespace {

VerifyResults verify_sums(const VerifyArguments& a) {
  const int64_t size = check_verify(a);
  const auto* sums = static_cast<const double*>(a.sums.const_data_ptr());
  const double* count = sums + size - 1;
  Status status = read_status(count, a.expectation);
  if (status == Status::kDisagreement && a.other_tail_sum.has_value()) {
    status = read_status(count, Expectation{true, *a.other_tail_sum});
  }
  check_status(status);
  check_more_than_one_value(*count);
  Tensor verified = allocate_vector(size, ScalarType::Double, a.sums);
  std::copy_n(sums, size, static_cast<double*>(verified.mutable_data_ptr()));
  return {verified};
}

}  // namespace
}  // namespace syncbn::cpu

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("verify_sums", &syncbn::boxed<syncbn::read_verify, syncbn::cpu::verify_sums>);
}
