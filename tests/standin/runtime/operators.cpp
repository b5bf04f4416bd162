// Loads the library that registers torch's operators, libstandin_aten.so beside this one.
//
// It cannot be preloaded: it needs torch's libraries, which must have registered their operators
// before. torch asks for the number of devices before it uses one: that call loads it.
#include "operators.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <string>

namespace standin {
namespace {

std::string find_library() {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&load_operators), &here);
  const std::string path = here.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "libstandin_aten.so";
}

}  // namespace

void load_operators() {
  static std::atomic<bool> is_loaded{false};
  if (dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY) == nullptr || is_loaded.exchange(true)) {
    return;
  }
  if (dlopen(find_library().c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "standin: %s\n", dlerror());
  }
}

}  // namespace standin
