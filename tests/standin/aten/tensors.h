// Replacements of CUDA tensors: CPU tensors at the same address, or tensors without memory.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>
#include <vector>

namespace standin {

using at::Tensor;
using c10::IValue;
using Stack = std::vector<c10::IValue>;

// Returns a CPU tensor of a CUDA tensor's memory. It does not own the memory, so that a program
// which frees memory too early is wrong here as on a GPU. A copy-on-write storage is copied only if
// the tensor is written.
Tensor alias(const Tensor& tensor, bool is_written);

// Returns a tensor without memory, of the same layout.
Tensor to_meta(const Tensor& tensor);

// Returns zeros on the CPU, of the same layout.
Tensor to_zeros(const Tensor& tensor);

// Returns a copy of a CPU tensor: the host may change the original before the work runs.
Tensor to_copy(const Tensor& tensor);

// Type promotion treats a Python number, which torch has wrapped, in its own way.
void keep_wrapped(const Tensor& from, const Tensor& to);

// Calls function(tensor) for each defined tensor of an argument or a result.
template <typename Function>
void for_each_tensor(const IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      function(value.toTensor());
    }
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) {
        function(tensor);
      }
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value() && tensor->defined()) {
        function(*tensor);
      }
    }
  }
}

// Returns an argument or a result with function(tensor) for each defined tensor.
template <typename Function>
IValue replace_tensors(const IValue& value, const Function& function) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? function(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      const bool is_there = tensor.has_value() && tensor->defined();
      list.push_back(is_there ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// Returns the tensors of all values, undefined where a result is left out.
std::vector<Tensor> flatten(const Stack& values);

}  // namespace standin
