// The argument checks that CPU and CUDA operators share, with the Python layer's messages.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "activations.h"
#include "geometry.h"
#include "message.h"
#include "scalar_type.h"

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

// A framework may shrink a tensor's storage between two uses; the tensor keeps its shape. `span` is
// the number of values from the tensor's first value to its last.
inline void check_memory(const char* op, const char* name, const Tensor& tensor, int64_t span) {
  int64_t num_bytes;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &num_bytes));
  const auto value_bytes = static_cast<int64_t>(tensor.element_size());
  SYNCBN_CHECK(
      span == 0 || (tensor.storage_offset() + span) * value_bytes <= num_bytes, op, ": expected ",
      name, " to have memory for its values, but its storage was resized to ", num_bytes, " bytes");
}

// Returns the input as kernels see it.
inline Geometry check_input(const char* op, const char* name, const Tensor& input) {
  SYNCBN_CHECK(is_supported_float(input.scalar_type()), op, ": expected ", name,
               " of dtype float16, bfloat16, float32 or float64, but got ",
               dtype_name(input.scalar_type()));
  SYNCBN_CHECK(input.dim() >= 2, op, ": expected ", name,
               " to have at least 2 dimensions, but got ", input.dim());
  SYNCBN_CHECK(input.size(1) > 0, op, ": expected ", name,
               " to have at least one channel, but got ", format_list(input.sizes()));
  const auto geometry = find_geometry(input.sizes().data(), input.strides().data(), input.dim());
  SYNCBN_CHECK(geometry.has_value(), op, ": expected ", name,
               " to be contiguous or channels-last, but got shape ", format_list(input.sizes()),
               " with strides ", format_list(input.strides()));
  check_memory(op, name, input, geometry->numel());
  return *geometry;
}

inline void check_same_device(const char* op, const char* name, const Tensor& tensor,
                              const Tensor& input) {
  SYNCBN_CHECK(tensor.device() == input.device(), op, ": expected ", name,
               " to be on the device of input");
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor, int64_t size) {
  SYNCBN_CHECK(tensor.dim() == 1 && tensor.size(0) == size, op, ": expected ", name,
               " to have shape [", size, "], but got ", format_list(tensor.sizes()));
}

// The tensor must have the input's shape, dtype, device and layout, so that one Geometry serves
// both.
inline void check_like_input(const char* op, const char* name, const Tensor& tensor,
                             const Tensor& input, const Geometry& geometry) {
  check_same_device(op, name, tensor, input);
  SYNCBN_CHECK(tensor.scalar_type() == input.scalar_type(), op, ": expected ", name,
               " to have dtype ", dtype_name(input.scalar_type()), ", but got ",
               dtype_name(tensor.scalar_type()));
  SYNCBN_CHECK(same_values(tensor.sizes(), input.sizes()), op, ": expected ", name,
               " to have shape ", format_list(input.sizes()), ", but got ",
               format_list(tensor.sizes()));
  SYNCBN_CHECK(check_input(op, name, tensor) == geometry, op, ": expected ", name,
               " to have the layout of input, strides ", format_list(input.strides()), ", but got ",
               format_list(tensor.strides()));
}

inline void check_like_input(const char* op, const char* name, const std::optional<Tensor>& tensor,
                             const Tensor& input, const Geometry& geometry) {
  if (tensor.has_value()) {
    check_like_input(op, name, *tensor, input, geometry);
  }
}

// Returns one byte for each position, 0 if the position is masked; null without a mask.
inline const uint8_t* check_mask(const char* op, const std::optional<Tensor>& mask,
                                 const Tensor& input, const Geometry& geometry) {
  if (!mask.has_value()) {
    return nullptr;
  }
  check_same_device(op, "mask", *mask, input);
  SYNCBN_CHECK(mask->scalar_type() == ScalarType::Bool, op, ": expected mask to have dtype bool, ",
               "but got ", dtype_name(mask->scalar_type()));
  bool fits = mask->dim() == input.dim() - 1 && mask->is_contiguous();
  for (int64_t d = 0; fits && d < mask->dim(); ++d) {
    fits = mask->size(d) == input.size(d == 0 ? 0 : d + 1);
  }
  SYNCBN_CHECK(fits, op, ": expected mask to be contiguous and to have the shape of input without ",
               "its channels, but got ", format_list(mask->sizes()), " with strides ",
               format_list(mask->strides()), " for an input of shape ", format_list(input.sizes()));
  check_memory(op, "mask", *mask, geometry.per_channel());
  return static_cast<const uint8_t*>(mask->const_data_ptr());
}

inline ActivationChoice to_activation(const char* op, int64_t activation, double negative_slope) {
  SYNCBN_CHECK(0 <= activation && activation < kNumActivations, op,
               ": expected activation to be 0 to ", kNumActivations - 1, ", but got ", activation);
  SYNCBN_CHECK(std::isfinite(negative_slope) && negative_slope >= 0, op,
               ": expected negative_slope to be finite and not negative, but got ", negative_slope);
  return {static_cast<Activation>(activation), negative_slope};
}

// A weight, a bias or running statistics: one value per channel.
inline void check_channel_vector(const char* op, const char* name,
                                 const std::optional<Tensor>& tensor, const Tensor& input) {
  if (!tensor.has_value()) {
    return;
  }
  check_same_device(op, name, *tensor, input);
  check_shape(op, name, *tensor, input.size(1));
  const ScalarType dtype = tensor->scalar_type();
  const ScalarType own = input.scalar_type();
  const bool is_16_bit = own == ScalarType::Half || own == ScalarType::BFloat16;
  SYNCBN_CHECK(dtype == own || dtype == ScalarType::Float || dtype == ScalarType::Double, op,
               ": expected ", name, " to have dtype ", is_16_bit ? dtype_name(own) : "",
               is_16_bit ? ", " : "", "float32 or float64, but got ", dtype_name(dtype));
  check_memory(op, name, *tensor, 1 + (tensor->size(0) - 1) * tensor->stride(0));
}

// An output must not be an expanded number.
inline void check_no_overlap(const char* op, const char* name,
                             const std::optional<Tensor>& tensor) {
  SYNCBN_CHECK(!tensor.has_value() || tensor->stride(0) != 0 || tensor->size(0) == 1, op,
               ": expected ", name, " to have memory for each channel, but it is expanded");
}

inline void check_grad_dtype(const char* op, const char* name, ScalarType dtype) {
  SYNCBN_CHECK(is_supported_float(dtype), op, ": expected ", name,
               " to be float16, bfloat16, float32 or float64, but got ", dtype_name(dtype));
}

inline void check_running(const char* op, const std::optional<Tensor>& running_mean,
                          const std::optional<Tensor>& running_var,
                          const std::optional<Tensor>& num_batches_tracked,
                          const std::optional<double>& momentum, const Tensor& input) {
  SYNCBN_CHECK(running_mean.has_value() == running_var.has_value(), op,
               ": expected both of running_mean and running_var or neither, but got only ",
               running_mean.has_value() ? "running_mean" : "running_var");
  check_channel_vector(op, "running_mean", running_mean, input);
  check_channel_vector(op, "running_var", running_var, input);
  check_no_overlap(op, "running_mean", running_mean);
  check_no_overlap(op, "running_var", running_var);
  if (num_batches_tracked.has_value()) {
    check_same_device(op, "num_batches_tracked", *num_batches_tracked, input);
    SYNCBN_CHECK(
        num_batches_tracked->scalar_type() == ScalarType::Long && num_batches_tracked->numel() == 1,
        op, ": expected num_batches_tracked to be one int64");
    check_memory(op, "num_batches_tracked", *num_batches_tracked, 1);
  } else {
    SYNCBN_CHECK(momentum.has_value() || !running_mean.has_value(), op,
                 ": expected num_batches_tracked with a momentum of None");
  }
}

// A message, or statistics that one operator passes to another.
inline void check_statistics(const char* op, const char* name, const Tensor& tensor, int64_t size,
                             const Tensor& input) {
  check_same_device(op, name, tensor, input);
  check_shape(op, name, tensor, size);
  SYNCBN_CHECK(tensor.scalar_type() == ScalarType::Double && tensor.is_contiguous(), op,
               ": expected ", name, " to be contiguous float64");
  check_memory(op, name, tensor, size);
}

// Scale and shift of each channel: backward passes compute the activation's argument z from them.
inline void check_constants(const char* op, const std::optional<Tensor>& constants,
                            const Tensor& input) {
  if (constants.has_value()) {
    check_statistics(op, "constants", *constants, 2 * input.size(1), input);
  }
}

// Returns the activation whose gradient a pass computes from `constants`.
inline ActivationChoice check_gradient_sources(const char* op, const Tensor& input,
                                               const std::optional<Tensor>& constants,
                                               int64_t activation, double negative_slope) {
  const ActivationChoice choice = to_activation(op, activation, negative_slope);
  check_constants(op, constants, input);
  SYNCBN_CHECK(constants.has_value() == (choice.kind != Activation::kNone), op,
               ": expected constants if there is an activation, and only then");
  return choice;
}

// The same for a pass that stores the activation's gradient: because a residual was added, or
// because SiLU's gradient should not be computed twice.
inline ActivationChoice check_stored_sources(const char* op, const Tensor& input,
                                             const Geometry& geometry,
                                             const std::optional<Tensor>& constants,
                                             int64_t activation, double negative_slope,
                                             const std::optional<Tensor>& residual,
                                             const std::optional<Tensor>& output) {
  const ActivationChoice choice = to_activation(op, activation, negative_slope);
  check_constants(op, constants, input);
  check_like_input(op, "residual", residual, input, geometry);
  check_like_input(op, "output", output, input, geometry);
  SYNCBN_CHECK(choice.kind != Activation::kNone, op,
               ": expected an activation; without it grad_output is the residual's gradient");
  const bool is_silu = choice.kind == Activation::kSilu;
  SYNCBN_CHECK(constants.has_value() == is_silu && (is_silu || !residual.has_value()) &&
                   output.has_value() != is_silu,
               op, ": expected constants for SiLU, output for ReLU and leaky ReLU");
  return choice;
}

inline Tail to_tail(const std::optional<double>& fingerprint, double next_size) {
  return {fingerprint.has_value(), fingerprint.value_or(0), next_size};
}

inline Expectation to_expectation(const std::optional<double>& fingerprint_sum) {
  return {fingerprint_sum.has_value(), fingerprint_sum.value_or(0)};
}

// Sums over all ranks: `size` values and a tail. The tail is optional unless it will be verified.
inline void check_sums(const char* op, const char* name, const Tensor& sums, int64_t size,
                       const Expectation& expectation, const Tensor& input) {
  const int64_t with_tail = size_with_tail(input.size(1));
  const bool has_tail = expectation.present || (sums.dim() == 1 && sums.size(0) == with_tail);
  check_statistics(op, name, sums, has_tail ? with_tail : size, input);
}

// For the CPU; CUDA operators never wait for the device.
inline void check_status(Status status) {
  SYNCBN_CHECK(status != Status::kAborted,
               "another rank of the process group aborted this pass because of an error; "
               "that rank's own message says which");
  SYNCBN_CHECK(status != Status::kDisagreement,
               "the ranks of the process group run different passes");
}

// For groups on the CPU. In a single process the layer has checked the input itself.
inline void check_more_than_one_value(double count) {
  SYNCBN_CHECK(count != 1,
               "Expected more than 1 value per channel when training, got 1 in the whole batch");
}

}  // namespace syncbn
