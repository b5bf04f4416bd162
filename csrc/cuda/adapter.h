// The plain arguments of the CUDA operators, made of torch's tensors.
#pragma once

#include <optional>

#include "../common/allocate.h"
#include "../common/checks.h"
#include "kernels/operators.h"

namespace syncbn::cuda {

// The input's device while an operator runs: made current, with torch's current stream of it.
class Device {
 public:
  Device(const char* op, const Tensor& input);

  void* stream() const { return stream_; }
  int multiprocessors() const { return multiprocessors_; }

  // `keep_alive` holds what the launch uses until it is enqueued; torch's allocator hands memory
  // on in the order of the stream.
  Workspace make_workspace(const Plan& plan, const Tensor& input,
                           std::vector<Tensor>& keep_alive) const;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int32_t index_;
  void* stream_;
  int multiprocessors_;
};

// Need check_channel_vector() before them. An output that shares its memory until it is written
// gets its own; an input, which kernels do not write, keeps sharing.
ChannelVector to_channel_input(const std::optional<Tensor>& tensor);
ChannelVector to_channel_output(const std::optional<Tensor>& tensor);

// Masks are for CPU tensors. On CUDA the Python layer fills the places that they leave out.
void check_no_mask(const char* op, const std::optional<Tensor>& mask);

// Null where there is none. Read only.
const void* to_data(const std::optional<Tensor>& tensor);

// Where kernels write a status: pinned memory of the host or memory of a device.
double* to_status(const char* op, const std::optional<Tensor>& tensor);

}  // namespace syncbn::cuda
