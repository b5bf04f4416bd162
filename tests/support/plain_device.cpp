// A stand-in for devices that this library has no operators for: its memory is the host's, and
// torch's CPU operators compute. Otherwise it is a separate device: its tensors are not CPU
// tensors, and only copies mix the two. On request it refuses float64, like devices that have none.

#include "plain_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

std::atomic<bool> has_float64{true};

void check_dtype(c10::ScalarType dtype) {
  const bool is_double =
      dtype == c10::ScalarType::Double || dtype == c10::ScalarType::ComplexDouble;
  TORCH_CHECK_TYPE(has_float64 || !is_double, "the stand-in device does not support float64");
}

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

// Work runs when it is enqueued: streams and events have nothing to wait for.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device getDevice() const override { return {kDevice, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, {kDevice, 0}); }
};

// A tensor over the same memory on the other side. It keeps the storage that it is made from.
at::Tensor alias(const at::Tensor& tensor, c10::DeviceType type) {
  const c10::Device device(type, type == kDevice ? 0 : -1);
  c10::Storage owner = tensor.storage();
  void* const data = owner.mutable_data();
  const size_t num_bytes = owner.nbytes();
  auto* const held = new c10::Storage(owner);
  c10::DataPtr pointer(
      data, held, [](void* held) { delete static_cast<c10::Storage*>(held); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, std::move(pointer),
                       c10::GetCPUAllocator(), /*resizable=*/true);
  const auto key = type == kDevice ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU;
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* const impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

}  // namespace

bool plain::is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

at::Tensor plain::to_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) {
    return tensor;
  }
  check_dtype(tensor.scalar_type());
  return alias(tensor, c10::DeviceType::CPU);
}

namespace {

using plain::is_ours;
using plain::to_host;

at::Tensor to_ours(const at::Tensor& tensor) {
  if (!tensor.defined() || is_ours(tensor)) {
    return tensor;
  }
  check_dtype(tensor.scalar_type());
  return alias(tensor, kDevice);
}

// An operator may have given memory to an output that had none.
void take_size(const at::Tensor& tensor, const at::Tensor& host) {
  if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides()) {
    auto* const impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(to_ours(host).storage());
    impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
}

// Computes by the CPU's operator on aliases of the arguments. As on a device, tensors of the host
// may only be single numbers.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  const size_t begin = stack->size() - num_arguments;
  const std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  const auto convert = [&](const at::Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || is_ours(tensor) || tensor.dim() == 0, schema.name(),
                ": expected all tensors to be on the stand-in device, but got one on ",
                tensor.device());
    return to_host(tensor);
  };
  for (size_t i = 0; i < num_arguments; ++i) {
    c10::IValue& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = convert(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        tensor = convert(tensor);
      }
      value = std::move(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor.has_value() ? std::optional(convert(*tensor)) : std::nullopt);
      }
      value = std::move(tensors);
    } else if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    }
  }
  const std::vector<c10::IValue> hosts(stack->begin() + begin, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto& returns = schema.returns();
  const size_t first = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    const c10::AliasInfo* const written = returns[i].alias_info();
    if (written != nullptr && written->isWrite()) {
      for (size_t j = 0; j < num_arguments; ++j) {  // returns the argument that it has written
        const c10::AliasInfo* const info = schema.arguments()[j].alias_info();
        if (info != nullptr && *info == *written) {
          take_size(given[j].toTensor(), hosts[j].toTensor());
          value = given[j];
        }
      }
    } else if (value.isTensor()) {
      value = to_ours(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        tensor = to_ours(tensor);
      }
      value = std::move(tensors);
    }
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  const auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  check_dtype(type);
  return to_ours(at::detail::empty_cpu(size, type, /*pin_memory=*/false, format));
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device>, std::optional<bool>) {
  const auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  check_dtype(type);
  return to_ours(at::detail::empty_strided_cpu(size, stride, type));
}

// The one way between host and device. A device without float64 does not convert to it either.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.scalar_type() != to.scalar_type()) {
    check_dtype(from.scalar_type());
    check_dtype(to.scalar_type());
  }
  to_host(to).copy_(to_host(from));
  return to;
}

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", [](const at::Tensor& tensor) { return to_host(tensor).item(); });
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
}

TORCH_LIBRARY(plain_device, m) {
  m.def("set_float64(bool supported) -> ()", [](bool supported) { has_float64 = supported; });
  m.def("register() -> ()", [] { at::RegisterPrivateUse1HooksInterface(new Hooks); });
}
