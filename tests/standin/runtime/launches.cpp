// Launches of kernels.
//
// Registered kernels run, such as translated PTX. Of torch's kernels, only the one of
// torch.cuda._sleep() runs, which spins for a number of cycles. The launch of any other is an error
// that names it.
#include <cxxabi.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "devices.h"
#include "enqueue.h"
#include "errors.h"
#include "kernels.h"
#include "standin.h"

using namespace standin;

namespace {

constexpr double kCyclesPerNanosecond = 1.7;

struct Launch {
  std::shared_ptr<const Kernel> kernel;
  dim3 grid, block;
  size_t shared_bytes;
  std::vector<std::vector<unsigned char>> arguments;

  void run() const {
    const unsigned num_blocks[] = {grid.x, grid.y, grid.z};
    const unsigned num_threads[] = {block.x, block.y, block.z};
    std::vector<const void*> pointers;
    for (const auto& argument : arguments) {
      pointers.push_back(argument.data());
    }
    kernel->run(kernel->data, num_blocks, num_threads, shared_bytes, pointers.data());
  }
};

std::string demangle(const std::string& name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

// The launch that is to fail, counted down, and whether the device fails with it.
std::atomic<int> launches_to_failure{0};
std::atomic<bool> ends_device{false};

cudaError_t find_planted_failure() {
  if (launches_to_failure == 0 || --launches_to_failure != 0) {
    return cudaSuccess;
  }
  if (ends_device) {
    fail_device(current_device(), "a planted failure");
    return check_device(current_device());
  }
  return fail(cudaErrorLaunchOutOfResources, "a planted failure");
}

cudaError_t refuse_launch(const std::string& words) {
  std::fprintf(stderr, "standin: %s\n", words.c_str());
  return fail(cudaErrorInvalidDeviceFunction, words);
}

WorkPointer make_sleep(const char* name, int64_t cycles) {
  const std::chrono::nanoseconds time(static_cast<int64_t>(cycles / kCyclesPerNanosecond));
  return make_work("kernel", name, [time] { std::this_thread::sleep_for(time); });
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments,
                   size_t shared_bytes, cudaStream_t stream) {
  const std::string* const name = Kernels::get().find_name(function);
  if (name == nullptr) {
    return refuse_launch("a launch of a function that is no kernel");
  }
  const auto kernel = Kernels::get().find_kernel(*name);
  if (kernel == nullptr && name->find("spin_kernel") != std::string::npos) {
    const auto cycles = *static_cast<const int64_t*>(arguments[0]);
    return enqueue_launch(stream, make_sleep(name->c_str(), cycles));
  }
  if (kernel == nullptr) {
    return refuse_launch("no code for the kernel " + demangle(*name));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0) {
    return fail(cudaErrorInvalidConfiguration, "a launch of nothing of " + demangle(*name));
  }
  const cudaError_t planted = find_planted_failure();
  if (planted != cudaSuccess) {
    return planted;
  }
  Launch call{kernel, grid, block, shared_bytes, {}};
  for (size_t i = 0; i < kernel->sizes.size(); ++i) {
    const auto* const from = static_cast<const unsigned char*>(arguments[i]);
    call.arguments.emplace_back(from, from + kernel->sizes[i]);
  }
  return enqueue_launch(stream, make_work("kernel", name->c_str(), [call] { call.run(); }));
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};

// The configuration of this thread's next launch, between nvcc's two calls for it.
thread_local Configuration next_launch;

}  // namespace

STANDIN_API void standin_fail_launch(int number, bool with_device) {
  launches_to_failure = number;
  ends_device = with_device;
}

STANDIN_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                 void* stream) {
  next_launch = {grid, block, shared_bytes, stream};
  return 0;
}

STANDIN_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                                   void* stream) {
  *grid = next_launch.grid;
  *block = next_launch.block;
  *shared_bytes = next_launch.shared_bytes;
  *static_cast<void**>(stream) = next_launch.stream;
  return cudaSuccess;
}

STANDIN_API cudaError_t __cudaLaunchKernel(const void* function, dim3 grid, dim3 block,
                                           void** arguments, size_t shared_bytes,
                                           cudaStream_t stream) {
  return launch(function, grid, block, arguments, shared_bytes, stream);
}

STANDIN_API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block,
                                         void** arguments, size_t shared_bytes,
                                         cudaStream_t stream) {
  return launch(function, grid, block, arguments, shared_bytes, stream);
}

STANDIN_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                            void** arguments) {
  return launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                config->stream);
}
