#include "arguments.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cmath>

namespace syncbn::pass {
namespace {

// The numbers of csrc/common/activations.h.
constexpr int64_t kRelu = 1;
constexpr int64_t kLeakyRelu = 2;

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

// Reads an activation whose derivative follows from the sign of the output; returns false for
// others.
bool read_activation(PyObject* name, int64_t& number) {
  if (name == Py_None) {
    return true;
  }
  if (!PyUnicode_CheckExact(name)) {
    return false;
  }
  if (PyUnicode_CompareWithASCIIString(name, "relu") == 0) {
    number = kRelu;
  } else if (PyUnicode_CompareWithASCIIString(name, "leaky_relu") == 0) {
    number = kLeakyRelu;
  }
  return number != 0;
}

bool is_none_or(PyObject* object, int64_t number) {
  int overflow = 0;
  return object == Py_None ||
         (PyLong_CheckExact(object) && PyLong_AsLongLongAndOverflow(object, &overflow) == number);
}

// Whether a number of dimensions is among `dims`, a tuple or a list; None is any.
bool is_among(int64_t number, PyObject* dims) {
  if (dims == Py_None) {
    return true;
  }
  const int is_found = PySequence_Contains(dims, py::int_(number).ptr());
  if (is_found < 0) {
    PyErr_Clear();  // Python's checks raise it, and abort the pass
  }
  return is_found == 1;
}

}  // namespace

std::optional<Arguments> Arguments::read(const Tensor& input, const py::tuple& given) {
  const auto at = [&](int field) { return PyTuple_GET_ITEM(given.ptr(), field); };
  Arguments a;
  a.input = input;
  double momentum = 0;
  double slope = 0;
  if (at(kMask) != Py_None || !read_activation(at(kActivation), a.activation) ||
      !read_tensor(at(kResidual), a.residual) || !read_number(at(kEps), a.eps) || a.eps < 0 ||
      !read_number(at(kSlope), slope) || slope < 0 ||
      !is_none_or(at(kNumFeatures), input.size(1)) || !is_among(input.dim(), at(kDims))) {
    return std::nullopt;
  }
  a.negative_slope = a.activation == 0 ? 0 : slope;  // the operators' default
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
