// cuDNN's batch normalization, and the backward pass of torch's own: torch's CPU kernel expects
// other dtypes of the saved statistics than CUDA's forward pass returns.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm.h>

#include <array>
#include <tuple>

#include "channels.h"
#include "own_kernels.h"

namespace standin {
namespace {

using at::Tensor;

struct Gradients {
  Tensor input, weight, bias;
};

// mean and invstd are constants if `trains` is false.
Gradients differentiate(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                        const Tensor& mean, const Tensor& invstd, bool trains) {
  const std::vector<int64_t> dims = other_dims(input);
  const Tensor x = wide(input), dy = wide(grad);
  const Tensor xhat = (x - as_channels(mean, x)) * as_channels(invstd, x);
  const Tensor db = dy.sum(dims), dw = (dy * xhat).sum(dims);
  Tensor dx = dy;
  if (trains) {
    const double n = static_cast<double>(x.numel()) / static_cast<double>(x.size(1));
    dx = dy - as_channels(db / n, x) - xhat * as_channels(dw / n, x);
  }
  dx = dx * as_channels(is_given(weight) ? invstd * wide(*weight) : invstd, x);
  const at::ScalarType dtype = is_given(weight) ? weight->scalar_type() : input.scalar_type();
  return {dx.to(input.scalar_type()), dw.to(dtype), db.to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
    double momentum, double eps) {
  auto [y, mean, invstd] = at::native_batch_norm(
      wide(input), wide(weight), wide(bias), running_mean, running_var, training, momentum, eps);
  Tensor reserve = at::empty({0}, input.options().dtype(at::kByte));
  return {y.to(input.scalar_type()), mean, invstd, reserve};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(
    const Tensor& input, const Tensor& grad, const Tensor& weight, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor& save_mean, const OptionalTensor& save_invstd,
    double, const Tensor&) {
  auto [dx, dw, db] =
      differentiate(grad, input, weight, wide(*save_mean), wide(*save_invstd), true);
  return {dx, dw, db};
}

std::tuple<Tensor, Tensor, Tensor> native_batch_norm_backward(
    const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& save_mean, const OptionalTensor& save_invstd, bool train, double eps,
    std::array<bool, 3> wanted) {
  const Tensor mean = wide(train ? *save_mean : *running_mean);
  const Tensor invstd = train ? wide(*save_invstd) : (wide(*running_var) + eps).rsqrt();
  auto [dx, dw, db] = differentiate(grad, input, weight, mean, invstd, train);
  return {wanted[0] ? dx : Tensor(), wanted[1] ? dw : Tensor(), wanted[2] ? db : Tensor()};
}

}  // namespace

OwnKernels batch_norm_kernels() {
  using c10::KernelFunction;
  return {
      {"aten::cudnn_batch_norm", KernelFunction::makeFromUnboxedRuntimeFunction(&cudnn_batch_norm)},
      {"aten::cudnn_batch_norm_backward",
       KernelFunction::makeFromUnboxedRuntimeFunction(&cudnn_batch_norm_backward)},
      {"aten::native_batch_norm_backward",
       KernelFunction::makeFromUnboxedRuntimeFunction(&native_batch_norm_backward)},
  };
}

}  // namespace standin
