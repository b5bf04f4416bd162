// Tells ThreadSanitizer, which sees neither torch nor libgomp, the order of at::parallel_for: the
// code before it, its pieces, in no order among themselves, and the code after it. Linked with
// --wrap=torch_parallel_for.

#include <sanitizer/tsan_interface.h>

#include "../../csrc/common/stable.h"

namespace {

using Function = void (*)(int64_t begin, int64_t end, void* context);

struct Region {
  Function function;
  void* context;
  char begun;  // their addresses name the two events
  char ended;
};

void run_piece(int64_t begin, int64_t end, void* context) {
  auto* const region = static_cast<Region*>(context);
  __tsan_acquire(&region->begun);
  region->function(begin, end, region->context);
  __tsan_release(&region->ended);
}

}  // namespace

extern "C" AOTITorchError __real_torch_parallel_for(int64_t, int64_t, int64_t, Function, void*);

extern "C" AOTITorchError __wrap_torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                                    Function function, void* context) {
  Region region{function, context, 0, 0};
  __tsan_release(&region.begun);
  const AOTITorchError error =
      __real_torch_parallel_for(begin, end, grain_size, run_piece, &region);
  __tsan_acquire(&region.ended);
  return error;
}
