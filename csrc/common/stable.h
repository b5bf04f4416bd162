// PyTorch's stable ABI. No other file may include a torch header.
//
// TORCH_TARGET_VERSION is the oldest torch that loads the binaries. It is no command-line option,
// because torch's copy of pybind11 cannot be included with it defined.
#pragma once

#define TORCH_TARGET_VERSION 0x020b000000000000ULL  // 2.11

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <sstream>
#include <stdexcept>

namespace syncbn {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

}  // namespace syncbn

// STD_TORCH_CHECK would put a file's path into the user's error.
#define SYNCBN_CHECK(condition, ...)              \
  do {                                            \
    if (!(condition)) {                           \
      ::syncbn::detail::throw_error(__VA_ARGS__); \
    }                                             \
  } while (false)

namespace syncbn::detail {

template <typename... Args>
[[noreturn]] void throw_error(const Args&... args) {
  std::ostringstream message;
  ((message << args), ...);
  throw std::runtime_error(message.str());
}

}  // namespace syncbn::detail
