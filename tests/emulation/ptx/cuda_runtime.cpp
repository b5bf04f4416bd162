// The functions of the CUDA 13 runtime that nvcc's host code calls to launch a kernel.
//
// nvcc compiles `kernel<<<...>>>(...)` to a call of a host function, the stub, and registers it
// under the kernel's name. So the real launch sets grids, blocks and arguments.

#include <map>

#include "registry.h"

namespace {

using syncbn::emulation::ptx::launch;

std::map<const void*, std::string>& names_of_stubs() {
  static std::map<const void*, std::string> names;
  return names;
}

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  void* stream;
} pushed;

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  names_of_stubs()[stub] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}

int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<void**>(stream) = pushed.stream;
  return 0;
}

int __cudaGetKernel(const void** kernel, const void* stub) {
  *kernel = stub;
  return 0;
}

int __cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments,
                       size_t shared_bytes, void*) {
  launch(names_of_stubs().at(stub), grid, block, shared_bytes, arguments);
  return 0;
}

// NOLINTBEGIN(readability-identifier-naming)
int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int) { return ""; }
// NOLINTEND(readability-identifier-naming)

}  // extern "C"
