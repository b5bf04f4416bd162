// Runs work, and turns what it throws into the error of its device.
#include "work.h"

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "errors.h"
#include "settings.h"

namespace standin {
namespace {

// The device whose work this thread runs, or -1.
thread_local int running_device = -1;

}  // namespace

Work::~Work() {
  if (work_.drop != nullptr) {
    work_.drop(work_.context);
  }
}

void Work::log() const {
  for (const char* logged : {"kernel", "copy", "collective"}) {
    if (std::strcmp(work_.kind, logged) == 0) {
      standin_log(work_.kind, work_.name);
    }
  }
}

void Work::run() const {
  if (settings().skips_kernels && std::strcmp(work_.kind, "kernel") == 0) {
    return;
  }
  try {
    work_.run(work_.context);
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(work_.name) + ": " + error.what());
  }
}

WorkPointer make_work(const char* kind, const char* name, std::function<void()> function) {
  using Function = std::function<void()>;
  const auto run = [](void* context) { (*static_cast<Function*>(context))(); };
  const auto drop = [](void* context) { delete static_cast<Function*>(context); };
  return std::make_shared<const Work>(
      StandinWork{kind, name, run, drop, new Function(std::move(function))});
}

void run_on_device(int device, const Work& work) {
  if (find_device_error(device) != cudaSuccess) {
    return;
  }
  running_device = device;
  try {
    work.run();
  } catch (const std::exception& error) {
    fail_device(device, error.what());
  }
  running_device = -1;
}

cudaError_t refuse_in_work(const char* name) {
  if (running_device < 0) {
    return cudaSuccess;
  }
  return fail(cudaErrorNotPermitted, std::string(name) + " in work that a stream runs");
}

}  // namespace standin

STANDIN_API int standin_running_device() { return standin::running_device; }
