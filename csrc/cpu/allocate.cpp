#include "../common/allocate.h"

namespace syncbn {

// Sizes are those of tensors that exist: memory is all that an allocation can lack.
void throw_allocation_failed(int64_t num_bytes, const Tensor& /*like*/) {
  detail::throw_error("DefaultCPUAllocator: can't allocate memory: syncbn tried to allocate ",
                      num_bytes, " bytes");
}

}  // namespace syncbn
