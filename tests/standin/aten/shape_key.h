// The arguments that shapes depend on, as bytes: many meta kernels are Python and take 100 us.
#pragma once

#include <c10/util/ArrayRef.h>

#include <string>

#include "tensors.h"

namespace standin {

// Returns nothing if an argument has a type whose values cannot be compared.
std::optional<std::string> shape_key(c10::ArrayRef<IValue> arguments);

}  // namespace standin
