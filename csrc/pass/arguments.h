// The arguments of syncbn/ops/arguments.py, for a pass without a mask.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace syncbn::pass {

namespace py = pybind11;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Arguments {
  Tensor input;
  OptionalTensor weight, bias, running_mean, running_var, num_batches_tracked;
  std::optional<double> momentum;
  double eps = 0;
  OptionalTensor residual;
  int64_t activation = 0;  // as in csrc/ops.cpp
  double negative_slope = 0;

  // Reads a tuple of syncbn.ops.arguments.Arguments. Returns nothing if a check or a conversion of
  // Python is needed, or another operator.
  static std::optional<Arguments> read(const Tensor& input, const py::tuple& given);
};

}  // namespace syncbn::pass
