// Finds buffers outside of allocations, which a GPU finds by an access or not at all.
#include "buffers.h"

#include <string>

#include "failure.h"
#include "standin.h"

namespace standin {

void check_buffer(const Call& call, const char* name, const void* data, size_t bytes) {
  if (bytes == 0) {
    return;
  }
  const auto address = reinterpret_cast<uint64_t>(data);
  uint64_t begin = 0;
  uint64_t end = 0;
  int device = 0;
  if (!standin_find_allocation(address, &begin, &end, &device)) {
    throw Failure(ncclInvalidArgument,
                  describe(call) + ": its " + name + " is not memory of a device");
  }
  if (end - address < bytes) {
    throw Failure(ncclInvalidArgument, describe(call) + ": its " + name + " of " +
                                           std::to_string(bytes) +
                                           " bytes ends outside of its allocation");
  }
}

}  // namespace standin
