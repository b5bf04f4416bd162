// How arguments and results of a call are translated.
#include "translate.h"

#include <ATen/ops/empty_strided.h>

namespace standin {
namespace {

bool is_number_of_the_cpu(const Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

Tensor translate_tensor(const Tensor& tensor, Target target, bool is_written) {
  // A meta kernel may ask for the value of a number.
  if (is_number_of_the_cpu(tensor)) {
    return target == Target::kMeta ? tensor : to_copy(tensor);
  }
  switch (target) {
    case Target::kMeta:
      return to_meta(tensor);
    case Target::kZeros:
      return to_zeros(tensor);
    case Target::kCpu:
      break;
  }
  return tensor.is_cuda() ? alias(tensor, is_written) : to_copy(tensor);
}

bool share_memory(const Tensor& one, const Tensor& other) {
  return one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl();
}

}  // namespace

Translation translate(const Facts& facts, c10::ArrayRef<IValue> arguments, Target target) {
  const c10::DeviceType device = target == Target::kMeta ? c10::kMeta : c10::kCPU;
  Translation translation;
  translation.arguments.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = arguments[i];
    if (value.isDevice()) {
      translation.arguments.emplace_back(c10::Device(device));
    } else if (value.isGenerator()) {
      translation.arguments.emplace_back();  // random.h provides one
    } else {
      translation.arguments.push_back(replace_tensors(value, [&](const Tensor& tensor) {
        translation.tensors.push_back(translate_tensor(tensor, target, facts.is_written[i]));
        return translation.tensors.back();
      }));
    }
  }
  return translation;
}

std::vector<Tensor> tensors_of(c10::ArrayRef<IValue> arguments) {
  std::vector<Tensor> tensors;
  for (const IValue& value : arguments) {
    for_each_tensor(value, [&](const Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

Place find_place(const std::vector<Tensor>& tensors, const std::vector<Tensor>& translated,
                 const Tensor& result, c10::Device device) {
  Place place;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (result.is_same(translated[i])) {
      place.tensor = tensors[i];
      place.is_argument = true;
      place.is_resized = tensors[i].sizes() != result.sizes();
      if (place.is_resized) {
        tensors[i].resize_(result.sizes());
      }
      return place;
    }
  }
  for (size_t i = 0; i < tensors.size() && result.numel() != 0; ++i) {
    if (share_memory(result, translated[i])) {
      // The memory of a meta tensor begins at its first value.
      const int64_t begin = tensors[i].storage_offset() - translated[i].storage_offset();
      place.tensor =
          tensors[i].as_strided(result.sizes(), result.strides(), begin + result.storage_offset());
      place.is_argument = true;
      return place;
    }
  }
  place.tensor = at::empty_strided(result.sizes(), result.strides(),
                                   c10::TensorOptions(device).dtype(result.dtype()));
  keep_wrapped(result, place.tensor);
  return place;
}

}  // namespace standin
