// The steps of csrc/pass, as Python calls them. Each returns None where Python has to make the
// pass. `given` is a syncbn.ops.arguments.Arguments, `record` a PassRecord.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

namespace syncbn::pass {

namespace py = pybind11;

// syncbn.training.train.
py::object train(const py::object& input, const py::tuple& given, const py::object& record);

// For graphs: the totals of a forward pass, and of a backward pass with grad_weight and grad_bias.
py::object sum_statistics(const py::object& input, const py::tuple& given,
                          const py::object& record);
py::object sum_gradients(const at::Tensor& grad_output, const at::Tensor& input,
                         const at::Tensor& mean, const at::Tensor& invstd,
                         at::ScalarType weight_dtype, at::ScalarType bias_dtype,
                         const py::object& record);

}  // namespace syncbn::pass
