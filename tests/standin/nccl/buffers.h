// The memory that callers name.
#pragma once

#include <cstddef>

#include "call.h"

namespace standin {

// Ends with a failure unless a buffer lies within an allocation of a device or of pinned memory.
void check_buffer(const Call& call, const char* name, const void* data, size_t bytes);

}  // namespace standin
