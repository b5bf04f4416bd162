// The translated kernels of a library, by nvcc's names.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "../grid.h"

namespace syncbn::emulation::ptx {

struct Parameter {
  size_t offset;
  size_t num_bytes;
};

struct Kernel {
  void (*function)(const unsigned char* parameters);
  std::vector<Parameter> parameters;
  unsigned max_threads;
};

// Each translated file has one for each of its kernels.
struct Registration {
  Registration(const char* name, const Kernel& kernel);
};

// Launches a kernel and waits for it; `arguments` points to each of its arguments.
//
// Throws std::runtime_error for faults that run_grid() and memory.h find, and for a block with more
// threads than the kernel was compiled for.
void launch(const std::string& name, dim3 grid, dim3 block, size_t shared_bytes,
            const void* const* arguments);

}  // namespace syncbn::emulation::ptx
