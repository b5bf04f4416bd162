#include "../common/allocate.h"

namespace syncbn {

// The sizes are valid, because another tensor has them: the only possible error is a lack of
// memory.
void throw_allocation_failed(int64_t num_bytes, const Tensor& /*like*/) {
  detail::throw_error("DefaultCPUAllocator: can't allocate memory: syncbn tried to allocate ",
                      num_bytes, " bytes");
}

}  // namespace syncbn
