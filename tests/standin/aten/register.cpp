// Which operators of CUDA tensors are replaced when this library is loaded.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <set>
#include <string>

#include "copy.h"
#include "fallback.h"
#include "own_kernels.h"

namespace standin {
namespace {

// Kernels of torch that launch nothing are kept: they make views, allocate, or call the runtime to
// copy.
const std::set<std::string> kStay = {
    "aten::_efficientzerotensor",
    "aten::_local_scalar_dense",
    "aten::_nested_view_from_buffer",
    "aten::_reshape_alias",
    "aten::as_strided",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::unfold",
    "aten::view",
    "aten::view_as_complex",
    "aten::view_as_real",
};

// torch has one kernel of these for all devices, which would call cuDNN.
const std::set<std::string> kComposite = {"aten::convolution"};

// Attention is then composed of other operators, because the CPU has no fused ones.
void disable_fused_attention() {
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
}

// Silences torch's warnings about replaced kernels.
class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::set<std::string> replaced_operators() {
  std::set<std::string> names = kComposite;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const std::string full = c10::toString(name);
    if (full.rfind("aten::", 0) == 0 && kStay.count(full) == 0 &&
        dispatcher.findOp(name)->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      names.insert(full);
    }
  }
  return names;
}

std::map<std::string, c10::KernelFunction> own_kernels() {
  std::map<std::string, c10::KernelFunction> all;
  for (OwnKernels kernels : {batch_norm_kernels(), sync_batch_norm_kernels(), dropout_kernels()}) {
    all.insert(kernels.begin(), kernels.end());
  }
  return all;
}

c10::OperatorHandle find(const std::string& full) {
  const size_t dot = full.find('.');
  const std::string overload = dot == std::string::npos ? "" : full.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(full.substr(0, dot).c_str(),
                                                        overload.c_str());
}

struct Registrations {
  Registrations()
      : library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__) {
    disable_fused_attention();
    Silent silent;
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    std::map<std::string, c10::KernelFunction> own = own_kernels();
    for (const std::string& name : replaced_operators()) {
      library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                     std::make_unique<Fallback>(find(name), own[name])));
    }
    library.impl("copy_", torch::CppFunction::makeFromBoxedFunctor(
                              std::make_unique<Copy>(find("aten::copy_"))));
  }

  torch::Library library;
};

// Work and views of it may outlive the statics of this file.
const Registrations* const registrations = new Registrations;

}  // namespace
}  // namespace standin
