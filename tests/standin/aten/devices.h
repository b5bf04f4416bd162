// Finds the device of a call, and refuses tensors of other devices as CUDA's operators do.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include "facts.h"
#include "tensors.h"

namespace standin {

// Returns the device that a call runs on. Tensors of other devices raise torch's error, except
// numbers of the CPU and indices.
c10::Device find_device(const Facts& facts, c10::ArrayRef<IValue> arguments);

// Returns whether tensors of a call are of several devices.
bool are_mixed(c10::ArrayRef<IValue> arguments);

// Copies indices to the device; as with a GPU, the host waits for them. It also waits to count a
// mask's values before they are written.
void move_indices(const Facts& facts, Stack* arguments, c10::Device device);

}  // namespace standin
