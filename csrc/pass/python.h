// Calls of Python: the rare steps of a pass, and the state of other modules.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace syncbn::pass {

namespace py = pybind11;

// An attribute's name, as an object that is made once.
class Name {
 public:
  explicit Name(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  py::handle object() const { return name_; }
  py::object of(py::handle object) const {
    PyObject* const value = PyObject_GetAttr(object.ptr(), name_);
    if (value == nullptr) {
      throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(value);
  }
  template <typename... Operands>
  py::object call(py::handle object, const Operands&... operands) const {
    PyObject* const values[] = {object.ptr(), operands.ptr()...};
    PyObject* const result =
        PyObject_VectorcallMethod(name_, values, 1 + sizeof...(operands), nullptr);
    if (result == nullptr) {
      throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(result);
  }

 private:
  PyObject* name_;
};

struct Names {
  Name append{"append"}, get_group{"get_group"}, group{"group"}, is_registered{"is_registered"},
      backward{"backward"}, layer{"layer"}, record{"record"}, state{"state"};
};

const Names& names();

inline py::object to_object(const c10::SafePyObject& kept) {
  return py::reinterpret_borrow<py::object>(kept.ptr(getPyInterpreter()));
}

// syncbn.distributed.collectives.SUM.
const c10d::AllreduceOptions& sum_options();
// Whether a program has replaced torch.distributed.all_reduce, so that its function must be called.
bool is_all_reduce_replaced();
// Whether the DistributedDataParallel model in its forward pass is within join().
bool is_ddp_joining();
// Whether torch traces backward passes for its compiler, which looks into nodes of Python only.
bool is_compiled_autograd_enabled();
// syncbn._compat.is_in_cuda_graph.
bool is_in_cuda_graph(const at::Tensor& tensor);

// Makes the backward pass in Python, if it needs more than the usual. `context` has the values of
// syncbn.training._LibraryContext.
torch::autograd::variable_list run_backward(const py::tuple& context,
                                            const at::Tensor& grad_output);

// Throw the error of syncbn/distributed/failures.py for an exception in reading the saved tensors,
// of an operator before the collective, of the collective, or of an operator behind it. The first
// two abort the pass.
[[noreturn]] void throw_unread(const std::exception_ptr& exception, const py::object& record,
                               const at::Tensor& grad_output);
[[noreturn]] void throw_aborted(const std::exception_ptr& exception, const py::object& record,
                                const at::Tensor& input, const py::object& arguments = py::none());
[[noreturn]] void throw_in_collective(const std::exception_ptr& exception, const py::object& record,
                                      const at::Tensor& message);
[[noreturn]] void throw_in_operator(const std::exception_ptr& exception, const py::object& record,
                                    const at::Tensor& input,
                                    const py::object& arguments = py::none());

}  // namespace syncbn::pass
