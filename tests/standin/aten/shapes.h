// The shapes of an operator's results, before it has run.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "translate.h"

namespace standin {

struct Shapes {
  std::vector<Tensor> translated;  // in place of the call's tensors
  Stack results;                   // tensors whose values mean nothing
};

// The shapes of one operator. The meta kernel gives them, or the CPU's operator on zeros where
// there is no meta kernel: a GPU's host does not wait there.
class ShapeFinder {
 public:
  ShapeFinder(const Facts& facts, const c10::KernelFunction& kernel)
      : facts_(facts), kernel_(kernel) {}

  // Returns null if the shapes depend on values.
  std::shared_ptr<const Shapes> find(const c10::OperatorHandle& op,
                                     c10::ArrayRef<IValue> arguments);

 private:
  std::shared_ptr<const Shapes> find_known(const std::string& key);
  Shapes ask_meta(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) const;
  Shapes ask_cpu(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) const;

  const Facts& facts_;
  const c10::KernelFunction& kernel_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Shapes>> known_;
};

}  // namespace standin
