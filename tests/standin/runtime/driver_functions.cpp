// The functions of the driver, for which torch asks by name.
// torch looks up all functions before it uses the first one. In place of a missing one it gets a
// function that writes its name and fails, so that only its use is an error.
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "errors.h"
#include "standin.h"

using namespace standin;

namespace {

constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED
constexpr size_t kMostMissing = 128;

// The names of functions that are missing, by the number of the function that stands for them.
std::array<std::string, kMostMissing>& missing_names() {
  static auto* const value = new std::array<std::string, kMostMissing>;
  return *value;
}

template <size_t number>
int missing() {
  std::fprintf(stderr, "standin: %s is not implemented\n", missing_names()[number].c_str());
  return kNotSupported;
}

using Function = int (*)();

template <size_t... numbers>
constexpr std::array<Function, sizeof...(numbers)> list_functions(std::index_sequence<numbers...>) {
  return {missing<numbers>...};
}

Function find_missing(const std::string& name) {
  static constexpr auto kFunctions = list_functions(std::make_index_sequence<kMostMissing>());
  // The numbers of the names so far.
  static auto* const numbers = new std::map<std::string, size_t>;
  static std::mutex* const mutex = new std::mutex;
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto [found, is_new] = numbers->emplace(name, numbers->size());
  if (found->second >= kMostMissing) {
    return nullptr;
  }
  missing_names()[found->second] = name;
  return kFunctions[found->second];
}

}  // namespace

STANDIN_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                         unsigned, unsigned long long,
                                                         cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) {
    *function = reinterpret_cast<void*>(find_missing(name));
  }
  const bool is_there = *function != nullptr;
  if (result != nullptr) {
    *result = is_there ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return is_there ? cudaSuccess : fail(cudaErrorSymbolNotFound, std::string("no function ") + name);
}
