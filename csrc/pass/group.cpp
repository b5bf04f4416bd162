#include "group.h"

#include <torch/csrc/autograd/python_variable.h>

#include "python.h"

namespace syncbn::pass {
namespace {

// Python asks the devices once in a while whether they stand still: _STALL_SECONDS of
// device_status.py.
constexpr auto kBetweenQuestions = std::chrono::seconds(1);

// The size of a message of C channels, as size_of of state.py.
int64_t size_of(int64_t channels) { return 2 * channels + 4; }

// Reads the devices' notes of failed passes. Returns false if Python has to look at them; else
// `status` is the note of the device.
bool read_notes(Group& state, const at::Tensor& input, std::optional<at::Tensor>& status) {
  if (state.notes.empty() && !input.is_cuda()) {
    return true;
  }
  if (state.waits_for_cuda) {  // Python waits for the operator that verifies the last sum
    return false;
  }
  const auto now = std::chrono::steady_clock::now();
  if (now - state.asked > kBetweenQuestions) {
    state.asked = now;
    return false;
  }
  for (const auto& [device, note] : state.notes) {
    const at::Tensor& on_host = THPVariable_Unpack(note.ptr());
    if (*static_cast<const volatile double*>(on_host.const_data_ptr()) != 0) {
      return false;
    }
    if (input.is_cuda() && device.cast<int64_t>() == input.get_device()) {
      status = on_host;
    }
  }
  return !input.is_cuda() || status.has_value();
}

// Whether the group is of torch's own class.
bool is_of_torch(const py::object& group) {
  static const PyObject* const type = py::type::of<c10d::ProcessGroup>().release().ptr();
  return reinterpret_cast<const PyObject*>(Py_TYPE(group.ptr())) == type;
}

}  // namespace

std::optional<Step> begin(const py::object& state_object, const py::object& record_object,
                          const at::Tensor& input) {
  if (state_object.is_none()) {
    return Step{};
  }
  auto& state = state_object.cast<Group&>();
  auto record = record_object.cast<std::shared_ptr<Record>>();
  std::optional<at::Tensor> status;
  if (state.is_misaligned || !record->kept_tail ||
      !state.last->is_followed_by(size_of(input.size(1))) || is_all_reduce_replaced() ||
      (record->is_forward && is_ddp_joining()) || !read_notes(state, input, status)) {
    return std::nullopt;
  }
  const py::object group = names().get_group.call(state_object);
  // Classes of Python may have methods of their own.
  if (!is_of_torch(group)) {
    return std::nullopt;
  }
  auto torchs = group.cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
  const double tail_sum = record->fingerprint * static_cast<double>(state.num_summed);
  return Step{&state, record, std::move(torchs), status, tail_sum};
}

at::Tensor all_reduce(const Step& step, at::Tensor message, const py::object& record) {
  if (step.state == nullptr) {
    return message;
  }
  Group& state = *step.state;
  state.num_passes += 1;
  state.size = message.numel();
  names().append.call(state.sizes_sent, py::int_(state.size));
  const bool is_same_half = step.record->is_forward == state.last->is_forward;
  state.num_in_row = is_same_half ? state.num_in_row + 1 : 1;
  state.last = step.record;
  state.next_size_sent = step.record->next_size;
  state.totals.reset();
  const c10d::AllreduceOptions& sum = sum_options();
  try {
    const py::gil_scoped_release no_gil;
    std::vector<at::Tensor> messages{message};
    const auto work = step.group->allreduce(messages, sum);
    if (work) {  // NCCL returns none in the current stream
      work->wait();
    }
  } catch (const std::exception&) {
    throw_in_collective(std::current_exception(), record, message);
  }
  if (!message.is_cuda() || !is_in_cuda_graph(message)) {
    state.totals = message;
  }
  return message;
}

}  // namespace syncbn::pass
