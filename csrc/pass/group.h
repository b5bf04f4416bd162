// The passes of a group, as syncbn/distributed/passes.py has them in Python, and the collective of
// a pass.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace syncbn::pass {

namespace py = pybind11;

constexpr int64_t kSeveral = 1;  // SEVERAL of passes.py

// One direction of one layer.
struct Record {
  std::string direction;
  bool is_forward;
  double fingerprint;
  std::vector<int64_t> sizes;
  int64_t next_size = 0;
  std::optional<at::Tensor> kept_tail;

  Record(std::string direction, double fingerprint)
      : direction(std::move(direction)),
        is_forward(this->direction == "forward"),
        fingerprint(fingerprint) {}

  void forget_sizes() {
    sizes.clear();
    next_size = 0;
    kept_tail.reset();
  }
  void add_size(int64_t size) {
    sizes.push_back(size);
    next_size = sizes.size() == 1 ? size : kSeveral;
    kept_tail.reset();
  }
  bool is_followed_by(int64_t size) const {
    return std::find(sizes.begin(), sizes.end(), size) != sizes.end();
  }
};

struct Group {
  bool adds_up;
  bool waits_for_cuda;
  bool is_misaligned = false;
  int64_t num_passes = 0;
  std::shared_ptr<Record> last;
  int64_t num_in_row = 0;
  int64_t size = 0;
  int64_t next_size_sent = 0;
  int64_t num_summed;
  std::optional<at::Tensor> totals;
  py::object sizes_sent;
  py::dict notes;
  // When a pass last asked in Python whether a device stands still.
  std::chrono::steady_clock::time_point asked;

  Group(bool adds_up, bool waits_for_cuda, int64_t num_ranks, py::object sizes_sent)
      : adds_up(adds_up),
        waits_for_cuda(waits_for_cuda),
        num_summed(adds_up ? num_ranks : 1),
        sizes_sent(std::move(sizes_sent)) {}
};

// A pass in a group that can make its collective at once: the ranks agree on the size, and no
// device has to be checked. In one process all values are empty.
struct Step {
  Group* state = nullptr;
  std::shared_ptr<Record> record;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::optional<at::Tensor> status;  // on CUDA
  std::optional<double> tail_sum;

  std::optional<at::Tensor> tail() const { return record ? record->kept_tail : std::nullopt; }
};

// Returns the pass of a record; nothing if Python has to make it. `state` is a GroupState, or None
// in one process.
std::optional<Step> begin(const py::object& state, const py::object& record,
                          const at::Tensor& input);

// Sums a message over the ranks, in place; returns it. In one process, returns it.
at::Tensor all_reduce(const Step& step, at::Tensor message, const py::object& record);

}  // namespace syncbn::pass
