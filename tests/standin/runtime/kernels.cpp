// Keeps the kernels, and takes their registrations: from nvcc's code, which knows names and
// functions, and from libraries of translated kernels, which know names and how they run.
#include "kernels.h"

#include <utility>

namespace standin {

Kernels& Kernels::get() {
  static Kernels* const value = new Kernels;
  return *value;
}

void Kernels::add_name(const void* function, std::string name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& own = names_[function];
  if (own != nullptr) {
    former_names_.push_back(own);
  }
  own = std::make_shared<const std::string>(std::move(name));
}

void Kernels::add_kernel(std::string name, Kernel kernel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kernels_[std::move(name)] = std::make_shared<const Kernel>(std::move(kernel));
}

const std::string* Kernels::find_name(const void* function) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = names_.find(function);
  return found == names_.end() ? nullptr : found->second.get();
}

std::shared_ptr<const Kernel> Kernels::find_kernel(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kernels_.find(name);
  return found == kernels_.end() ? nullptr : found->second;
}

}  // namespace standin

using namespace standin;

STANDIN_API void standin_register_kernel(const char* name, const size_t* sizes, size_t number,
                                         StandinKernel kernel, const void* data) {
  Kernels::get().add_kernel(name, {{sizes, sizes + number}, kernel, data});
}

STANDIN_API void** __cudaRegisterFatBinary(void*) {
  // nvcc's code only hands it back.
  static void* handle = nullptr;
  return &handle;
}

STANDIN_API void __cudaRegisterFatBinaryEnd(void**) {}

STANDIN_API void __cudaUnregisterFatBinary(void**) {}

STANDIN_API char __cudaInitModule(void**) { return 1; }

STANDIN_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int,
                                        uint3*, uint3*, dim3*, dim3*, int*) {
  Kernels::get().add_name(function, name);
}

STANDIN_API cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return cudaSuccess;
}
