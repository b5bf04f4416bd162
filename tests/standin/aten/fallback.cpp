// What happens in a call of an operator.
#include "fallback.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <unordered_set>
#include <utility>

#include "deferred.h"
#include "devices.h"
#include "standin.h"
#include "translate.h"

namespace standin {
namespace {

std::optional<Draw> take_draw(const Facts& facts, const Stack& arguments, c10::Device device) {
  if (!facts.is_random) {
    return std::nullopt;
  }
  const IValue none;
  return Draw(facts.generator >= 0 ? arguments[facts.generator] : none, device.index());
}

bool has_indices(const Stack& arguments) {
  for (const IValue& value : arguments) {
    if (value.isOptionalTensorList()) {
      return true;
    }
  }
  return false;
}

Tensor sparse_to_cuda(const Tensor& result, c10::Device device) {
  return at::_sparse_coo_tensor_unsafe(result._indices().to(device), result._values().to(device),
                                       result.sizes());
}

}  // namespace

Fallback::Fallback(const c10::OperatorHandle& op, c10::KernelFunction kernel)
    : facts_(op), kernel_(std::move(kernel)), shapes_(facts_, kernel_) {}

void Fallback::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(facts_.num_arguments);
  Stack arguments(std::make_move_iterator(begin), std::make_move_iterator(stack->end()));
  stack->erase(begin, stack->end());
  if (facts_.is_foreach && are_mixed(arguments)) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, arguments);
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    return;
  }
  for (IValue& result : call(op, std::move(arguments))) {
    stack->push_back(std::move(result));
  }
}

Stack Fallback::call(const c10::OperatorHandle& op, Stack arguments) const {
  const BackendOnly guard;
  TORCH_CHECK_NOT_IMPLEMENTED(kernel_.isValid() || has_kernel(op, c10::DispatchKey::CPU),
                              "standin: ", facts_.name, " has no counterpart on the CPU");
  const c10::Device device = find_device(facts_, arguments);
  const c10::cuda::CUDAGuard device_guard(device);
  if (has_indices(arguments)) {
    move_indices(facts_, &arguments, device);
  }
  const std::shared_ptr<const Shapes> shapes = shapes_.find(op, arguments);
  if (shapes == nullptr) {
    return wait_and_compute(op, arguments, device);
  }
  const std::vector<Tensor> tensors = tensors_of(arguments);
  Stack results;
  std::unordered_set<const c10::TensorImpl*> made;
  for (const IValue& value : shapes->results) {
    results.push_back(replace_tensors(value, [&](const Tensor& shape) {
      Place place = find_place(tensors, shapes->translated, shape, device);
      if (!place.is_argument) {
        made.insert(place.tensor.unsafeGetTensorImpl());
      }
      return place.tensor;
    }));
  }
  std::vector<Tensor> places = flatten(results);
  for (Tensor& place : places) {
    place = made.count(place.unsafeGetTensorImpl()) != 0 ? alias(place, true) : Tensor();
  }
  enqueue({facts_, op, kernel_, translate(facts_, arguments, Target::kCpu).arguments,
           std::move(places), take_draw(facts_, arguments, device)},
          device);
  return results;
}

Stack Fallback::wait_and_compute(const c10::OperatorHandle& op, const Stack& arguments,
                                 c10::Device device) const {
  standin_log("kernel", facts_.name.c_str());
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device.index())));
  const std::vector<Tensor> tensors = tensors_of(arguments);
  const Translation translation = translate(facts_, arguments, Target::kCpu);
  const Stack values = compute(
      {facts_, op, kernel_, translation.arguments, {}, take_draw(facts_, arguments, device)});
  Stack results;
  for (const IValue& value : values) {
    results.push_back(replace_tensors(value, [&](const Tensor& result) {
      if (result.layout() != c10::kStrided) {
        return sparse_to_cuda(result, device);
      }
      const Place place = find_place(tensors, translation.tensors, result, device);
      if (!place.is_argument || place.is_resized) {
        alias(place.tensor, true).copy_(result);
      }
      return place.tensor;
    }));
  }
  return results;
}

}  // namespace standin
