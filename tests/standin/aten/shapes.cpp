// How the shapes of results are found.
#include "shapes.h"

#include <exception>
#include <string>

#include "deferred.h"
#include "shape_key.h"

namespace standin {
namespace {

// Bounds the memory that programs need whose shapes never repeat.
constexpr size_t kMostKnown = 1000;

bool is_sparse(const Stack& results) {
  bool found = false;
  for (const IValue& value : results) {
    for_each_tensor(value,
                    [&](const Tensor& tensor) { found |= tensor.layout() != c10::kStrided; });
  }
  return found;
}

}  // namespace

std::shared_ptr<const Shapes> ShapeFinder::find(const c10::OperatorHandle& op,
                                                c10::ArrayRef<IValue> arguments) {
  if (facts_.has_numbers) {
    return nullptr;
  }
  if (!facts_.has_shapes_of_cuda && has_kernel(op, c10::DispatchKey::Meta)) {
    const std::optional<std::string> key = shape_key(arguments);
    if (auto known = key.has_value() ? find_known(*key) : nullptr) {
      return known;
    }
    try {
      auto shapes = std::make_shared<const Shapes>(ask_meta(op, arguments));
      const std::lock_guard<std::mutex> lock(mutex_);
      if (key.has_value() && known_.size() < kMostKnown) {
        known_.emplace(*key, shapes);
      }
      return shapes;
    } catch (const std::exception&) {
      // If the arguments are wrong, the CPU's operator raises the same error as a GPU's.
    }
  }
  if (facts_.is_dynamic) {
    return nullptr;
  }
  auto shapes = std::make_shared<const Shapes>(ask_cpu(op, arguments));
  return is_sparse(shapes->results) ? nullptr : shapes;
}

std::shared_ptr<const Shapes> ShapeFinder::find_known(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find(key);
  return found == known_.end() ? nullptr : found->second;
}

Shapes ShapeFinder::ask_meta(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) const {
  Translation call = translate(facts_, arguments, Target::kMeta);
  Stack results = call.arguments;
  op.callBoxed(&results);
  TORCH_CHECK(!is_sparse(results));
  return {std::move(call.tensors), std::move(results)};
}

Shapes ShapeFinder::ask_cpu(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) const {
  const Translation call = translate(facts_, arguments, Target::kZeros);
  Stack results = compute({facts_, op, kernel_, call.arguments, {}, std::nullopt});
  return {call.tensors, std::move(results)};
}

}  // namespace standin
