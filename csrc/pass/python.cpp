#include "python.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace syncbn::pass {
namespace {

// Objects that live as long as the process; Python may be gone when static objects are destroyed.
struct Modules {
  py::object distributed = py::module_::import("torch.distributed");
  py::object collectives = py::module_::import("syncbn.distributed.collectives");
  py::object torchs_all_reduce = collectives.attr("TORCHS_ALL_REDUCE");
  c10d::AllreduceOptions sum = collectives.attr("SUM").cast<c10d::AllreduceOptions>();
  py::object data_parallel =
      py::module_::import("torch.nn.parallel").attr("DistributedDataParallel");
  py::object compat = py::module_::import("syncbn._compat");
  py::object failures = py::module_::import("syncbn.distributed.failures");
  py::object training = py::module_::import("syncbn.training");
};

const Modules& modules() {
  // Not guarded as a static object is: an import may wait for the GIL, whose holder would wait for
  // the guard.
  static const Modules* all = nullptr;
  if (all == nullptr) {
    all = new Modules();
  }
  return *all;
}

// Throws the Python error that is set, so that it passes through torch's engine.
[[noreturn]] void throw_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// Returns the exception as an object with its traceback.
py::object to_python(const std::exception_ptr& exception) {
  torch::translate_exception_to_python(exception);
  const py::error_already_set error;
  if (error.trace()) {
    PyException_SetTraceback(error.value().ptr(), error.trace().ptr());
  }
  return error.value();
}

// Throws the error that a function of Python makes of an exception, and interrupts such as
// KeyboardInterrupt as they are.
template <typename... Operands>
[[noreturn]] void throw_from(py::object Modules::* module, const char* function,
                             const std::exception_ptr& exception, const Operands&... operands) {
  try {
    py::object error = to_python(exception);
    if (PyErr_GivenExceptionMatches(error.ptr(), PyExc_Exception) != 0) {
      error = (modules().*module).attr(function)(error, operands...);
      if (PyObject* const cause = PyException_GetCause(error.ptr())) {
        Py_DECREF(cause);
      } else {
        PyException_SetCause(error.ptr(), nullptr);  // as by "from None"
      }
    }
    PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
  } catch (py::error_already_set& failed) {
    failed.restore();
  }
  throw_error();
}

}  // namespace

const Names& names() {
  static const Names all;
  return all;
}

const c10d::AllreduceOptions& sum_options() { return modules().sum; }

bool is_all_reduce_replaced() {
  static const Name all_reduce("all_reduce");
  return !all_reduce.of(modules().distributed).is(modules().torchs_all_reduce);
}

bool is_ddp_joining() {
  static const Name active("_active_ddp_module"), join("_join_config"), enable("enable");
  const py::object model = active.of(modules().data_parallel);
  return !model.is_none() && enable.of(join.of(model)).cast<bool>();
}

bool is_compiled_autograd_enabled() {
  static const Name name("torch._dynamo.compiled_autograd"), enabled("compiled_autograd_enabled");
  PyObject* const module = PyDict_GetItemWithError(PyImport_GetModuleDict(), name.object().ptr());
  return module != nullptr && enabled.of(module).is(py::handle(Py_True));
}

bool is_in_cuda_graph(const at::Tensor& tensor) {
  return modules().compat.attr("is_in_cuda_graph")(tensor).cast<bool>();
}

torch::autograd::variable_list run_backward(const py::tuple& context,
                                            const at::Tensor& grad_output) {
  torch::autograd::variable_list gradients;
  try {
    const py::tuple results = modules().training.attr("backward_of_library")(context, grad_output);
    for (const py::handle result : results) {
      gradients.push_back(result.is_none() ? at::Tensor() : result.cast<at::Tensor>());
    }
  } catch (py::error_already_set& error) {
    error.restore();
    throw_error();
  }
  return gradients;
}

void throw_unread(const std::exception_ptr& exception, const py::object& record,
                  const at::Tensor& grad_output) {
  throw_from(&Modules::training, "unread_by_library", exception, record, grad_output);
}

void throw_aborted(const std::exception_ptr& exception, const py::object& record,
                   const at::Tensor& input, const py::object& arguments) {
  throw_from(&Modules::failures, "abort", exception, record, input, arguments);
}

void throw_in_collective(const std::exception_ptr& exception, const py::object& record,
                         const at::Tensor& message) {
  throw_from(&Modules::failures, "in_collective", exception, record, message);
}

void throw_in_operator(const std::exception_ptr& exception, const py::object& record,
                       const at::Tensor& input, const py::object& arguments) {
  throw_from(&Modules::failures, "in_operator", exception, record, input, arguments);
}

}  // namespace syncbn::pass
