// __device__ variables: each device has its own copy of each, which is zero at first use.
// The first use loads the variable's module, which a capture forbids.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "captures.h"
#include "devices.h"
#include "errors.h"
#include "memory.h"
#include "standin.h"

using namespace standin;

namespace {

class Variables {
 public:
  static Variables& get() {
    static Variables* const value = new Variables;
    return *value;
  }

  void add(const void* symbol, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_[symbol] = {size, {}};
  }

  // Finds the variable's address on the current device.
  cudaError_t find(const void* symbol, void** address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = all_.find(symbol);
    if (found == all_.end()) {
      return fail(cudaErrorInvalidSymbol, "a symbol that is no __device__ variable");
    }
    auto& [size, addresses] = found->second;
    void*& own = addresses[current_device()];
    if (own == nullptr) {
      if (const cudaError_t error = load(&own, size)) {
        return error;
      }
    }
    *address = own;
    return cudaSuccess;
  }

 private:
  struct Variable {
    size_t size;
    std::map<int, void*> addresses;  // by device
  };

  static cudaError_t load(void** address, size_t size) {
    if (const cudaError_t error = refuse_if_unsafe("cudaGetSymbolAddress")) {
      return error;
    }
    if (const cudaError_t error = Memory::get().allocate(address, size, current_device())) {
      return error;
    }
    std::memset(*address, 0, size);
    return cudaSuccess;
  }

  std::mutex mutex_;
  std::map<const void*, Variable> all_;  // by nvcc's variable of the host
};

}  // namespace

STANDIN_API void __cudaRegisterVar(void**, char* symbol, char*, const char*, int, size_t size, int,
                                   int) {
  Variables::get().add(symbol, size);
}

STANDIN_API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  return Variables::get().find(symbol, address);
}

STANDIN_API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t size,
                                           size_t offset, cudaMemcpyKind kind) {
  void* address = nullptr;
  if (const cudaError_t error = Variables::get().find(symbol, &address)) {
    return error;
  }
  return cudaMemcpy(static_cast<char*>(address) + offset, from, size, kind);
}
