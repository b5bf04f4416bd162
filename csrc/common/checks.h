// The argument checks that CPU and CUDA operators share. A message that a user can cause begins
// with the Python exception that syncbn/ops/batch_norm.py makes of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "geometry.h"
#include "scalar_type.h"

#define SYNCBN_CHECK_TYPE(condition, ...) SYNCBN_CHECK(condition, "TypeError: ", __VA_ARGS__)
#define SYNCBN_CHECK_VALUE(condition, ...) SYNCBN_CHECK(condition, "ValueError: ", __VA_ARGS__)

namespace syncbn {

inline std::string format_list(torch::headeronly::IntHeaderOnlyArrayRef values) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < values.size(); ++i) {
    text << (i == 0 ? "" : ", ") << values[i];
  }
  text << "]";
  return text.str();
}

inline bool same_values(torch::headeronly::IntHeaderOnlyArrayRef a,
                        torch::headeronly::IntHeaderOnlyArrayRef b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

inline std::string device_name(const Tensor& tensor) {
  using torch::headeronly::DeviceType;
  const auto device = tensor.device();
  switch (device.type()) {
    case DeviceType::CPU:
      return "cpu";
    case DeviceType::Meta:
      return "meta";
    case DeviceType::CUDA:
      return "cuda:" + std::to_string(device.index());
    case DeviceType::XPU:
      return "xpu:" + std::to_string(device.index());
    default:
      return "another device";
  }
}

// The checks of the arguments of a pass, in training and evaluation.

inline void check_float_input(const Tensor& input) {
  SYNCBN_CHECK_TYPE(is_supported_float(input.scalar_type()),
                    "expected input of dtype float16, bfloat16, float32 or float64, but got ",
                    dtype_name(input.scalar_type()));
  SYNCBN_CHECK_VALUE(input.dim() >= 2, "expected at least 2D input (got ", input.dim(), "D input)");
  SYNCBN_CHECK_VALUE(input.size(1) > 0,
                     "SyncBatchNorm number of input channels should be non-zero");
}

inline void check_same_device(const char* name, const Tensor& tensor, const Tensor& input) {
  SYNCBN_CHECK_VALUE(tensor.device() == input.device(), "expected ", name, " to be on ",
                     device_name(input), ", the device of input, but got ", device_name(tensor));
}

inline void check_shape(const char* name, const Tensor& tensor, int64_t size) {
  SYNCBN_CHECK_VALUE(tensor.dim() == 1 && tensor.size(0) == size, "expected ", name,
                     " to have shape [", size, "], but got ", format_list(tensor.sizes()));
}

// A weight, a bias or running statistics: one value per channel.
inline void check_channel_vector(const char* name, const std::optional<Tensor>& tensor,
                                 const Tensor& input) {
  if (!tensor.has_value()) {
    return;
  }
  check_shape(name, *tensor, input.size(1));
  const ScalarType dtype = tensor->scalar_type();
  const ScalarType own = input.scalar_type();
  const bool is_16_bit = own == ScalarType::Half || own == ScalarType::BFloat16;
  SYNCBN_CHECK_TYPE(dtype == own || dtype == ScalarType::Float || dtype == ScalarType::Double,
                    "expected ", name, " to have dtype ", is_16_bit ? dtype_name(own) : "",
                    is_16_bit ? ", " : "", "float32 or float64, but got ", dtype_name(dtype));
  check_same_device(name, *tensor, input);
}

// Running statistics that are written must not be an expanded number.
inline void check_no_overlap(const char* name, const std::optional<Tensor>& tensor) {
  SYNCBN_CHECK_VALUE(!tensor.has_value() || tensor->stride(0) != 0 || tensor->size(0) == 1,
                     "expected ", name,
                     " to have memory for each channel, but it is expanded; call .clone() first");
}

inline void check_running(const ForwardArguments& a) {
  SYNCBN_CHECK_VALUE(a.running_mean.has_value() == a.running_var.has_value(),
                     "expected both of running_mean and running_var or neither, but got only ",
                     a.running_mean.has_value() ? "running_mean" : "running_var");
  if (a.num_batches_tracked.has_value()) {
    const ScalarType dtype = a.num_batches_tracked->scalar_type();
    SYNCBN_CHECK_TYPE(is_real_number(dtype) && a.num_batches_tracked->numel() == 1,
                      "expected num_batches_tracked to be one number, but got ", dtype_name(dtype),
                      " of shape ", format_list(a.num_batches_tracked->sizes()));
    check_same_device("num_batches_tracked", *a.num_batches_tracked, a.input);
  }
}

// The tensor must have the input's shape, dtype and device.
inline void check_like_input(const char* name, const Tensor& tensor, const Tensor& input) {
  SYNCBN_CHECK_TYPE(tensor.scalar_type() == input.scalar_type(), "expected ", name,
                    " to have dtype ", dtype_name(input.scalar_type()),
                    ", the dtype of input, but got ", dtype_name(tensor.scalar_type()));
  SYNCBN_CHECK_VALUE(same_values(tensor.sizes(), input.sizes()), "expected ", name,
                     " to have shape ", format_list(input.sizes()),
                     ", the shape of input, but got ", format_list(tensor.sizes()));
  check_same_device(name, tensor, input);
}

inline void check_mask(const std::optional<Tensor>& mask, const Tensor& input) {
  if (!mask.has_value()) {
    return;
  }
  SYNCBN_CHECK_TYPE(mask->scalar_type() == ScalarType::Bool,
                    "expected mask to have dtype bool, but got ", dtype_name(mask->scalar_type()),
                    "; compare it with a valid value, as in mask > 0");
  const int64_t channel_dims = mask->dim() == input.dim() ? 1 : 0;
  bool fits = mask->dim() == input.dim() - 1 + channel_dims;
  for (int64_t d = 0; fits && d < mask->dim(); ++d) {
    const bool is_channel = channel_dims == 1 && d == 1;
    fits = mask->size(d) == (is_channel ? 1 : input.size(d == 0 ? 0 : d + 1 - channel_dims));
  }
  if (!fits) {
    std::vector<int64_t> with_one(input.sizes().begin(), input.sizes().end());
    with_one[1] = 1;
    std::vector<int64_t> positions = with_one;
    positions.erase(positions.begin() + 1);
    detail::throw_error("ValueError: expected mask to have shape ", format_list(positions), " or ",
                        format_list(with_one), ", one value for each position of input, or sizes ",
                        "of 1 there, but got ", format_list(mask->sizes()));
  }
  check_same_device("mask", *mask, input);
}

// All arguments of a pass, but for layout and memory. The first operator of a pass calls this, so
// that a rank fails before it meets the others.
inline void check_arguments(const ForwardArguments& a) {
  check_float_input(a.input);
  check_channel_vector("weight", a.weight, a.input);
  check_channel_vector("bias", a.bias, a.input);
  check_channel_vector("running_mean", a.running_mean, a.input);
  check_channel_vector("running_var", a.running_var, a.input);
  check_running(a);
  if (a.training) {
    check_no_overlap("running_mean", a.running_mean);
    check_no_overlap("running_var", a.running_var);
  }
  if (a.residual.has_value()) {
    check_like_input("residual", *a.residual, a.input);
  }
  check_mask(a.mask, a.input);
  SYNCBN_CHECK_TYPE(!a.training || a.momentum.has_value() || a.num_batches_tracked.has_value() ||
                        !a.running_mean.has_value(),
                    "expected momentum to be a number, but got NoneType");
}

// A variance of one value per channel is undefined.
inline void check_more_than_one_value(const Tensor& input) {
  SYNCBN_CHECK_VALUE(input.numel() != input.size(1),
                     "Expected more than 1 value per channel when training, got input size "
                     "torch.Size(",
                     format_list(input.sizes()), ")");
}

// The same for sums, of a group or with a mask.
inline void check_more_than_one_value(double count) {
  SYNCBN_CHECK_VALUE(count != 1,
                     "Expected more than 1 value per channel when training, got 1 in the whole "
                     "batch");
}

// The checks of layout and memory, and of tensors that operators pass to each other.

// A framework may shrink a tensor's storage between two uses; the tensor keeps its shape. `span` is
// the number of values from the tensor's first value to its last.
inline void check_memory(const char* name, const Tensor& tensor, int64_t span) {
  int64_t num_bytes;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &num_bytes));
  const auto value_bytes = static_cast<int64_t>(tensor.element_size());
  SYNCBN_CHECK(span == 0 || (tensor.storage_offset() + span) * value_bytes <= num_bytes,
               "expected ", name, " to have memory for its values, but its storage was resized to ",
               num_bytes, " bytes");
}

inline void check_vector_memory(const char* name, const std::optional<Tensor>& vector) {
  if (vector.has_value()) {
    check_memory(name, *vector, 1 + (vector->size(0) - 1) * vector->stride(0));
  }
}

// Returns a tensor with the input's shape as kernels see it.
inline Geometry check_layout(const char* name, const Tensor& tensor) {
  const auto geometry = find_geometry(tensor.sizes().data(), tensor.strides().data(), tensor.dim());
  SYNCBN_CHECK(geometry.has_value(), "expected ", name,
               " to be contiguous or channels-last, but got shape ", format_list(tensor.sizes()),
               " with strides ", format_list(tensor.strides()));
  check_memory(name, tensor, geometry->numel());
  return *geometry;
}

inline Geometry check_input(const Tensor& input) {
  check_float_input(input);
  return check_layout("input", input);
}

// The layout must be the input's, too, so that one Geometry serves both.
inline void check_like_input(const char* name, const Tensor& tensor, const Tensor& input,
                             const Geometry& geometry) {
  check_like_input(name, tensor, input);
  SYNCBN_CHECK(check_layout(name, tensor) == geometry, "expected ", name,
               " to have the layout of input, strides ", format_list(input.strides()), ", but got ",
               format_list(tensor.strides()));
}

inline void check_like_input(const char* name, const std::optional<Tensor>& tensor,
                             const Tensor& input, const Geometry& geometry) {
  if (tensor.has_value()) {
    check_like_input(name, *tensor, input, geometry);
  }
}

// Returns one byte for each position, 0 if the position is masked; null without a mask.
inline const uint8_t* check_mask(const std::optional<Tensor>& mask, const Tensor& input,
                                 const Geometry& geometry) {
  if (!mask.has_value()) {
    return nullptr;
  }
  check_mask(mask, input);
  SYNCBN_CHECK(mask->is_contiguous(), "expected mask to be contiguous, but got strides ",
               format_list(mask->strides()));
  check_memory("mask", *mask, geometry.per_channel());
  return static_cast<const uint8_t*>(mask->const_data_ptr());
}

inline ActivationChoice to_activation(int64_t activation, double negative_slope) {
  SYNCBN_CHECK(0 <= activation && activation < kNumActivations, "expected activation to be 0 to ",
               kNumActivations - 1, ", but got ", activation);
  SYNCBN_CHECK(std::isfinite(negative_slope) && negative_slope >= 0,
               "expected negative_slope to be finite and not negative, but got ", negative_slope);
  return {static_cast<Activation>(activation), negative_slope};
}

inline void check_grad_dtype(const char* name, ScalarType dtype) {
  SYNCBN_CHECK(is_supported_float(dtype), "expected ", name,
               " to be float16, bfloat16, float32 or float64, but got ", dtype_name(dtype));
}

// A message, or statistics that one operator passes to another.
inline void check_statistics(const char* name, const Tensor& tensor, int64_t size,
                             const Tensor& input) {
  check_same_device(name, tensor, input);
  check_shape(name, tensor, size);
  SYNCBN_CHECK(tensor.scalar_type() == ScalarType::Double && tensor.is_contiguous(), "expected ",
               name, " to be contiguous float64");
  check_memory(name, tensor, size);
}

// Scale and shift of each channel: backward passes compute the activation's argument z from them.
inline void check_constants(const std::optional<Tensor>& constants, const Tensor& input) {
  if (constants.has_value()) {
    check_statistics("constants", *constants, 2 * input.size(1), input);
  }
}

// A tail is memory of the host on any device, so that no operator waits.
inline Tail read_tail(const std::optional<Tensor>& tensor) {
  Tail tail;
  if (tensor.has_value()) {
    check_shape("tail", *tensor, kTailSize);
    SYNCBN_CHECK(
        tensor->scalar_type() == ScalarType::Double && tensor->is_contiguous() && tensor->is_cpu(),
        "expected tail to be contiguous float64 on the CPU");
    check_memory("tail", *tensor, kTailSize);
    tail.present = true;
    std::copy_n(static_cast<const double*>(tensor->const_data_ptr()), kTailSize, tail.values);
  }
  return tail;
}

// Sums over all ranks: `size` values and a tail. The tail is optional unless it will be verified.
inline void check_sums(const char* name, const Tensor& sums, int64_t size,
                       const Expectation& expectation, const Tensor& input) {
  const int64_t with_tail = size_with_tail(input.size(1));
  const bool has_tail = expectation.present || (sums.dim() == 1 && sums.size(0) == with_tail);
  check_statistics(name, sums, has_tail ? with_tail : size, input);
}

// Returns the number of values without the tail's sum.
inline int64_t check_verify(const VerifyArguments& a) {
  const int64_t size = a.sums.dim() == 1 ? a.sums.size(0) : 0;
  SYNCBN_CHECK(size > kTailSize, "expected sums to have shape [n + ", kTailSize,
               "], a count and a tail at the end, but got ", format_list(a.sums.sizes()));
  check_statistics("sums", a.sums, size, a.sums);
  return size - kTailSize;
}

inline Geometry check_apply(const ForwardArguments& a) {
  const Geometry geometry = check_input(a.input);
  check_sums("totals", required(a.totals), 2 * geometry.channels + 1, a.expectation, a.input);
  check_arguments(a);
  check_vector_memory("weight", a.weight);
  check_vector_memory("bias", a.bias);
  check_vector_memory("running_mean", a.running_mean);
  check_vector_memory("running_var", a.running_var);
  if (a.num_batches_tracked.has_value()) {
    SYNCBN_CHECK(a.num_batches_tracked->scalar_type() == ScalarType::Long,
                 "expected num_batches_tracked to be int64");
    check_memory("num_batches_tracked", *a.num_batches_tracked, 1);
  }
  check_like_input("residual", a.residual, a.input, geometry);
  check_constants(a.constants, a.input);
  return geometry;
}

// Of an activation whose gradient a pass computes: from `constants` or, if the pass stores dz, also
// from the residual or the output.
inline ActivationChoice check_activation_gradient(const BackwardArguments& a,
                                                  const Geometry& geometry) {
  const ActivationChoice choice = to_activation(a.activation, a.negative_slope);
  check_constants(a.constants, a.input);
  if (!a.dz.has_value()) {
    SYNCBN_CHECK(a.constants.has_value() == (choice.kind != Activation::kNone),
                 "expected constants if there is an activation, and only then");
    return choice;
  }
  check_like_input("residual", a.residual, a.input, geometry);
  check_like_input("output", a.output, a.input, geometry);
  SYNCBN_CHECK(choice.kind != Activation::kNone,
               "expected an activation; without it grad_output is the residual's gradient");
  const bool from_output = choice.is_from_output();
  SYNCBN_CHECK(a.output.has_value() == from_output && a.constants.has_value() != from_output &&
                   !(from_output && a.residual.has_value()),
               "expected output for ReLU and leaky ReLU, constants for other activations");
  return choice;
}

inline Geometry check_saved(const BackwardArguments& a) {
  const Geometry geometry = check_input(a.input);
  check_like_input("grad_output", a.grad_output, a.input, geometry);
  check_statistics("mean", a.mean, geometry.channels, a.input);
  check_statistics("invstd", a.invstd, geometry.channels, a.input);
  return geometry;
}

inline Geometry check_reduce(const BackwardArguments& a) {
  check_grad_dtype("weight_dtype", a.weight_dtype);
  check_grad_dtype("bias_dtype", a.bias_dtype);
  return check_saved(a);
}

inline Geometry check_backward_apply(const BackwardArguments& a) {
  const Geometry geometry = check_saved(a);
  check_channel_vector("weight", a.weight, a.input);
  check_vector_memory("weight", a.weight);
  check_sums("sums", required(a.sums), 2 * geometry.channels, a.expectation, a.input);
  check_statistics("count", required(a.count), 1, a.input);
  return geometry;
}

// For the CPU; CUDA operators never wait for the device.
inline void check_status(Status status) {
  SYNCBN_CHECK(status != Status::kAborted,
               "another rank of the process group aborted this pass because of an error; "
               "that rank's own message says which");
  SYNCBN_CHECK(status != Status::kDisagreement,
               "the ranks of the process group run different passes");
}

}  // namespace syncbn
