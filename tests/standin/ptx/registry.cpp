#include "ptx/registry.h"

#include <map>

#include "ptx/memory.h"

namespace emulation::ptx {
namespace {

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

}  // namespace

Registration::Registration(const char* name, const Kernel& kernel) {
  if (!kernels().emplace(name, kernel).second) {
    throw std::logic_error(std::string("two kernels of the name ") + name);
  }
}

void for_each_kernel(const std::function<void(const std::string&, const Kernel&)>& function) {
  for (const auto& [name, kernel] : kernels()) {
    function(name, kernel);
  }
}

void launch(const std::string& name, dim3 grid, dim3 block, size_t shared_bytes,
            const void* const* arguments) {
  launch(kernels().at(name), grid, block, shared_bytes, arguments);
}

void launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared_bytes,
            const void* const* arguments) {
  const uint64_t num_threads = uint64_t{block.x} * block.y * block.z;
  if (num_threads > kernel.max_threads) {
    throw std::runtime_error("launch: " + std::to_string(num_threads) +
                             " threads of a kernel for at most " +
                             std::to_string(kernel.max_threads));
  }
  alignas(16) unsigned char parameters[4096];
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const auto& [offset, num_bytes] = kernel.parameters[i];
    if (offset + num_bytes > sizeof(parameters)) {
      throw std::runtime_error("launch: more than 4096 bytes of parameters");
    }
    std::memcpy(parameters + offset, arguments[i], num_bytes);
  }
  written.clear();
  run_grid(grid, block, shared_bytes, [&] { kernel.function(parameters); });
}

}  // namespace emulation::ptx

// For ctypes: returns an error message or nullptr.
extern "C" const char* launch_ptx(const char* name, unsigned blocks, unsigned threads,
                                  size_t shared_bytes, size_t unwritten, size_t unwritten_bytes,
                                  const void* const* arguments) {
  using namespace emulation;
  static std::string message;
  emulation::unwritten = {unwritten, unwritten + unwritten_bytes};
  try {
    ptx::launch(name, blocks, threads, shared_bytes, arguments);
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}
