// Conversions from torch's tensors to the arguments of kernels/launchers.h.
#pragma once

#include <optional>

#include "../common/allocate.h"
#include "../common/checks.h"
#include "kernels/launchers.h"

namespace syncbn::cuda {

// Makes the input's device the current one while an operator runs, with torch's current stream.
class Device {
 public:
  explicit Device(const Tensor& input);

  void* stream() const { return stream_; }
  int multiprocessors() const { return multiprocessors_; }

  // The memory must stay in `keep_alive` until the launch is enqueued; torch's allocator reuses
  // memory in the order of the stream.
  Workspace make_workspace(const Plan& plan, const Tensor& input,
                           std::vector<Tensor>& keep_alive) const;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int32_t index_;
  void* stream_;
  int multiprocessors_;
};

// mutable_data_ptr() gives a copy-on-write output its own memory; an input stays shared.
ChannelVector to_channel_input(const std::optional<Tensor>& tensor);
ChannelVector to_channel_output(const std::optional<Tensor>& tensor);

// On CUDA the Python layer fills masked positions.
void check_no_mask(const std::optional<Tensor>& mask);

// The data of an input, null without a tensor.
const void* to_data(const std::optional<Tensor>& tensor);

// The memory that kernels write a status to: pinned memory of the host or memory of a device.
double* to_status(const std::optional<Tensor>& tensor);

}  // namespace syncbn::cuda
