// Checks of callers' buffers.
#pragma once

#include <cstddef>

#include "call.h"

namespace standin {

// Throws a Failure unless a buffer lies within an allocation of a device or of pinned memory.
void check_buffer(const Call& call, const char* name, const void* data, size_t bytes);

}  // namespace standin
