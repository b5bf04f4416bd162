// The translated kernels of a library, by nvcc's names.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "threads/grid.h"

namespace emulation::ptx {

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

// Calls the function with each kernel and its name.
void for_each_kernel(const std::function<void(const std::string&, const Kernel&)>& function);

// Runs a launch of a kernel; `arguments` points to each of its arguments.
//
// Throws std::runtime_error for faults that run_grid() and memory.h find, and for a block with more
// threads than the kernel was compiled for.
void launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared_bytes,
            const void* const* arguments);

// The same for the kernel of this name.
void launch(const std::string& name, dim3 grid, dim3 block, size_t shared_bytes,
            const void* const* arguments);

}  // namespace emulation::ptx
