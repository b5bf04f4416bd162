// The Python module syncbn._pass_torch_X_Y: the usual training pass, for one minor version of
// torch, whose full C++ interface it uses.

// All files are one translation unit: torch's headers are half the work of compiling it, and each
// file by itself would read them again.
#include <torch/csrc/Exceptions.h>

// NOLINTBEGIN(bugprone-suspicious-include)
#include "arguments.cpp"
#include "group.cpp"
#include "python.cpp"
#include "training.cpp"
// NOLINTEND(bugprone-suspicious-include)

namespace py = pybind11;
using syncbn::pass::Group;
using syncbn::pass::Record;

PYBIND11_MODULE(SYNCBN_PASS_MODULE, m) {
  m.doc() = "The usual training pass of syncbn in C++";
  m.attr("torch_version") = SYNCBN_BUILT_WITH_TORCH;
  m.def("train", torch::wrap_pybind_function(&syncbn::pass::train));
  m.def("sum_statistics", torch::wrap_pybind_function(&syncbn::pass::sum_statistics));
  m.def("sum_gradients", torch::wrap_pybind_function(&syncbn::pass::sum_gradients));
  py::class_<Record, std::shared_ptr<Record>>(m, "Record")
      .def(py::init<std::string, double>())
      .def_readonly("direction", &Record::direction)
      .def_readonly("fingerprint", &Record::fingerprint)
      .def_readonly("is_forward", &Record::is_forward)
      .def_readonly("sizes", &Record::sizes)
      .def_readonly("next_size", &Record::next_size)
      .def_readwrite("kept_tail", &Record::kept_tail)
      .def("forget_sizes", &Record::forget_sizes)
      .def("add_size", &Record::add_size);
  py::class_<Group>(m, "Group")
      .def(py::init<bool, bool, int64_t, py::object>())
      .def_readonly("adds_up", &Group::adds_up)
      .def_readonly("waits_for_cuda", &Group::waits_for_cuda)
      .def_readwrite("is_misaligned", &Group::is_misaligned)
      .def_readwrite("num_passes", &Group::num_passes)
      .def_readwrite("last", &Group::last)
      .def_readwrite("num_in_row", &Group::num_in_row)
      .def_readwrite("size", &Group::size)
      .def_readwrite("next_size_sent", &Group::next_size_sent)
      .def_readwrite("num_summed", &Group::num_summed)
      .def_readwrite("totals", &Group::totals)
      .def_readonly("sizes_sent", &Group::sizes_sent)
      .def_readonly("notes", &Group::notes);
}
