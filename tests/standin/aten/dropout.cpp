// Dropout: it has no generator argument, so the CPU's operator would use the CPU's generator.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include <optional>
#include <tuple>

#include "deferred.h"
#include "own_kernels.h"

namespace standin {
namespace {

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  const c10::TensorOptions of_mask = input.options().dtype(at::kBool);
  if (!train.value_or(true)) {
    return {input.clone(), at::ones_like(input, of_mask)};
  }
  Tensor mask = at::empty_like(input, of_mask).bernoulli_(1 - p, current_generator());
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

}  // namespace

OwnKernels dropout_kernels() {
  return {{"aten::native_dropout",
           c10::KernelFunction::makeFromUnboxedRuntimeFunction(&native_dropout)}};
}

}  // namespace standin
