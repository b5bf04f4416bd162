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

#include <cstdio>
#include <stdexcept>
#include <string>

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

// No streams, also not in other files: where a compiler links its libstdc++ statically, streams
// mix it with the libstdc++ of torch and crash.
inline std::string to_text(const std::string& text) { return text; }
inline std::string to_text(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", number);
  return text;
}
template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
std::string to_text(Integer number) {
  return std::to_string(number);
}

template <typename... Args>
[[noreturn]] void throw_error(const Args&... args) {
  std::string message;
  ((message += to_text(args)), ...);
  throw std::runtime_error(message);
}

}  // namespace syncbn::detail
