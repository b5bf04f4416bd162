// A call's arguments for another device, and the way back for its results.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include "facts.h"
#include "tensors.h"

namespace standin {

enum class Target {
  kMeta,   // shapes
  kCpu,    // the tensors' own memory
  kZeros,  // memory that is thrown away
};

struct Translation {
  Stack arguments;
  std::vector<Tensor> tensors;  // of the arguments, in their order
};

Translation translate(const Facts& facts, c10::ArrayRef<IValue> arguments, Target target);

// Returns the tensors of a call in the order of Translation::tensors.
std::vector<Tensor> tensors_of(c10::ArrayRef<IValue> arguments);

// A result on CUDA.
struct Place {
  Tensor tensor;
  bool is_argument = false;  // or shares an argument's memory
  bool is_resized = false;   // an out= that had another shape
};

// Returns where a result goes: to the argument that it is, or to new memory. The result was made
// from `translated`, which stands for the call's `tensors`.
Place find_place(const std::vector<Tensor>& tensors, const std::vector<Tensor>& translated,
                 const Tensor& result, c10::Device device);

}  // namespace standin
