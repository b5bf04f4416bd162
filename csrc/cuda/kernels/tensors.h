// The tensors of a kernel with the geometry and dtype of the input.
#pragma once

namespace syncbn::cuda {

template <typename T, int kInputs>
struct Tensors {
  const T* input[kInputs];
  T* output;  // null if the kernel has none
};

template <typename T, int kInputs>
Tensors<T, kInputs> make_tensors(const void* const (&inputs)[kInputs], void* output) {
  Tensors<T, kInputs> tensors;
  for (int i = 0; i < kInputs; ++i) {
    tensors.input[i] = static_cast<const T*>(inputs[i]);
  }
  tensors.output = static_cast<T*>(output);
  return tensors;
}

}  // namespace syncbn::cuda
