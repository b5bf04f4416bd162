// How the work of an operator runs.
#include "deferred.h"

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <stdexcept>
#include <string>

#include "standin.h"

namespace standin {
namespace {

thread_local at::Generator running_generator;

// The call in which work may run.
struct Caller {
  const void* work;
  std::exception_ptr error;
};
thread_local Caller* caller = nullptr;

// A GPU finds these errors in its kernel, after which the device is unusable.
bool is_found_by_kernel(const Facts& facts, const std::string& message) {
  return facts.name.rfind("aten::_assert_async", 0) == 0 ||
         message.find("out of bounds") != std::string::npos ||
         message.find("out of range") != std::string::npos;
}

void copy_results(const Deferred& work, const Stack& values) {
  const std::vector<Tensor> results = flatten(values);
  for (size_t i = 0; i < work.results.size(); ++i) {
    const Tensor& place = work.results[i];
    // The CPU leaves some unused results empty.
    if (!place.defined() || !results[i].defined() || results[i].numel() == 0) {
      continue;
    }
    TORCH_CHECK(place.sizes() == results[i].sizes(), "standin: ", work.facts.name, " gave ",
                results[i].sizes(), " on the CPU instead of ", place.sizes());
    place.copy_(results[i]);
  }
}

void run(void* context) {
  const auto& work = *static_cast<const Deferred*>(context);
  const BackendOnly guard;
  const c10::NoGradGuard no_grad;
  try {
    copy_results(work, compute(work));
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    if (caller != nullptr && caller->work == context && !is_found_by_kernel(work.facts, message)) {
      caller->error = std::current_exception();
      return;
    }
    throw std::runtime_error(message);
  }
}

void drop(void* context) { delete static_cast<Deferred*>(context); }

}  // namespace

const at::Generator& current_generator() { return running_generator; }

Stack compute(const Deferred& work) {
  Stack stack = work.arguments;
  if (work.facts.is_random) {
    running_generator = work.draw.has_value() ? work.draw->make_generator() : make_generator(0);
    if (work.facts.generator >= 0) {
      stack[work.facts.generator] = running_generator;
    }
  }
  if (work.kernel.isValid()) {
    work.kernel.callBoxed(work.op, c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  } else {
    work.op.callBoxed(&stack);
  }
  return stack;
}

void enqueue(Deferred work, c10::Device device) {
  auto* const context = new Deferred(std::move(work));
  const StandinWork task{"kernel", context->facts.name.c_str(), run, drop, context};
  Caller here{context, nullptr};
  Caller* const outer = std::exchange(caller, &here);
  const cudaError_t error = standin_enqueue(c10::cuda::getCurrentCUDAStream(device.index()), &task);
  caller = outer;
  C10_CUDA_CHECK(error);
  if (here.error) {
    std::rethrow_exception(here.error);
  }
}

}  // namespace standin
