#include "arguments.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cmath>

namespace syncbn::pass {
namespace {

// The places of the fields.
enum { kMomentum = 5, kEps, kNumFeatures, kActivation, kSlope, kDims, kResidual, kMask };

// Reads None or a plain tensor; returns false for other objects.
bool read_tensor(PyObject* object, OptionalTensor& tensor) {
  if (object == Py_None) {
    return true;
  }
  if (!THPVariable_CheckExact(object)) {
    return false;
  }
  tensor = THPVariable_Unpack(object);
  return true;
}

// Reads a finite float; returns false for other objects.
bool read_number(PyObject* object, double& number) {
  number = PyFloat_CheckExact(object) ? PyFloat_AS_DOUBLE(object) : NAN;
  return std::isfinite(number);
}

bool is_none_or(PyObject* object, int64_t number) {
  return object == Py_None || (PyLong_CheckExact(object) && PyLong_AsLongLong(object) == number);
}

// Whether a number of dimensions is among `dims`; None is any.
bool is_among(int64_t number, PyObject* dims) {
  if (dims == Py_None) {
    return true;
  }
  for (const py::handle dim : py::reinterpret_borrow<py::tuple>(dims)) {
    if (is_none_or(dim.ptr(), number)) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::optional<Arguments> Arguments::read(const Tensor& input, const py::tuple& given) {
  const auto at = [&](int field) { return PyTuple_GET_ITEM(given.ptr(), field); };
  Arguments a;
  a.input = input;
  double slope = 0;
  double momentum = 0;
  if (at(kActivation) != Py_None || at(kResidual) != Py_None || at(kMask) != Py_None ||
      !read_number(at(kEps), a.eps) || a.eps < 0 || !read_number(at(kSlope), slope) || slope < 0 ||
      !is_none_or(at(kNumFeatures), input.size(1)) || !is_among(input.dim(), at(kDims))) {
    return std::nullopt;
  }
  OptionalTensor* const vectors[kMomentum] = {&a.weight, &a.bias, &a.running_mean, &a.running_var,
                                              &a.num_batches_tracked};
  for (int i = 0; i < kMomentum; ++i) {
    if (!read_tensor(at(i), *vectors[i])) {
      return std::nullopt;
    }
  }
  if (a.num_batches_tracked && a.num_batches_tracked->scalar_type() != at::kLong) {
    return std::nullopt;
  }
  if (read_number(at(kMomentum), momentum)) {
    a.momentum = momentum;
  } else if (at(kMomentum) != Py_None || !a.num_batches_tracked) {
    return std::nullopt;
  }
  return a;
}

}  // namespace syncbn::pass
