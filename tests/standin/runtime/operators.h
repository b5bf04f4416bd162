// The library of torch's operators for the stand-in's devices.
#pragma once

namespace standin {

// Loads it once torch's own CUDA library is there; does nothing before that or a second time.
void load_operators();

}  // namespace standin
