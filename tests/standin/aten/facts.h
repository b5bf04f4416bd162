// An operator's schema, read once, because thousands of calls need it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace standin {

// Returns whether an operator can run on a device. Modules of torch register kernels later on, too.
bool has_kernel(const c10::OperatorHandle& op, c10::DispatchKey key);

struct Facts {
  explicit Facts(const c10::OperatorHandle& op);

  std::string name;  // "aten::add.Tensor"
  size_t num_arguments;
  std::vector<std::string> argument_names;
  std::vector<bool> is_written;  // of each argument
  int generator = -1;            // the argument that is a generator
  bool is_random;
  bool is_foreach;
  bool is_index_put;
  bool has_numbers = false;  // results that the host reads
  bool has_shapes_of_cuda;   // the meta kernel gives CUDA's shapes, not the CPU's
  bool is_dynamic;           // shapes of results depend on values
  bool is_pointwise;         // it has its own error for tensors of two devices
};

}  // namespace standin
