// How the device of a call is found and checked.
#include "devices.h"

#include <ATen/core/op_registration/adaption.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

namespace standin {
namespace {

[[noreturn]] void fail_as_torch(const Facts& facts, size_t argument, c10::Device device,
                                const Tensor& tensor) {
  TORCH_CHECK(!facts.is_pointwise,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              device, " and ", tensor.device(), "!");
  c10::impl::common_device_check_failure(device, tensor, facts.name.c_str(),
                                         facts.argument_names[argument].c_str());
  TORCH_CHECK(false);
}

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(c10::kCUDA, c10::cuda::current_device());
}

bool is_mask(const Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

// For x[mask] = number no positions are needed.
bool fills(const Facts& facts, const Stack& arguments) {
  const IValue& value = arguments[2];
  return value.isTensor() && value.toTensor().is_cpu() && value.toTensor().numel() == 1;
}

}  // namespace

c10::Device find_device(const Facts& facts, c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> device;
  for (const IValue& value : arguments) {
    for_each_tensor(value, [&](const Tensor& tensor) {
      if (!device.has_value() && tensor.is_cuda()) {
        device = tensor.device();
      }
    });
    if (!device.has_value() && value.isDevice()) {
      device = with_index(value.toDevice());
    }
  }
  TORCH_CHECK(device.has_value(), "standin: ", facts.name, " has no CUDA tensor");
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool are_indices = arguments[i].isOptionalTensorList();
    for_each_tensor(arguments[i], [&](const Tensor& tensor) {
      const bool is_fine =
          tensor.device() == *device || (tensor.is_cpu() && (are_indices || tensor.dim() == 0));
      if (!is_fine) {
        fail_as_torch(facts, i, *device, tensor);
      }
    });
  }
  return *device;
}

bool are_mixed(c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> device;
  bool mixed = false;
  for (const IValue& value : arguments) {
    if (value.isTensorList()) {
      for_each_tensor(value, [&](const Tensor& tensor) {
        mixed |= device.has_value() && *device != tensor.device();
        device = tensor.device();
      });
    }
  }
  return mixed;
}

void move_indices(const Facts& facts, Stack* arguments, c10::Device device) {
  bool has_masks = false;
  for (IValue& value : *arguments) {
    if (value.isOptionalTensorList()) {
      value = replace_tensors(value, [&](const Tensor& index) {
        has_masks |= is_mask(index);
        return index.is_cuda() ? index : index.to(device);
      });
    }
  }
  if (facts.is_index_put && has_masks && !fills(facts, *arguments)) {
    C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device.index())));
  }
}

}  // namespace standin
