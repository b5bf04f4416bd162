// The kernels of torch.nn.SyncBatchNorm, which are CUDA's only.
#include <ATen/TensorOperators.h>

#include <tuple>

#include "channels.h"
#include "own_kernels.h"

namespace standin {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  const std::vector<int64_t> dims = other_dims(input);
  const Tensor x = wide(input);
  const Tensor mean = x.mean(dims);
  return {mean, ((x - as_channels(mean, x)).square().mean(dims) + eps).rsqrt()};
}

void update(const OptionalTensor& running, const Tensor& value, double momentum) {
  if (is_given(running)) {
    Tensor to = *running;
    to.mul_(1 - momentum).add_(value.to(to.scalar_type()), momentum);
  }
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor&, const Tensor& mean, const Tensor& invstd, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, double momentum, double eps, const Tensor& counts) {
  const Tensor n = counts.to(at::kDouble).unsqueeze(1);
  const Tensor total = n.sum();
  const Tensor means = mean.to(at::kDouble);
  const Tensor vars = invstd.to(at::kDouble).pow(-2) - eps;
  const Tensor all = (n * means).sum(0) / total;
  const Tensor var = (n * (vars + (means - all).square())).sum(0) / total;
  update(running_mean, all, momentum);
  update(running_var, var * total / (total - 1), momentum);
  return {all.to(mean.scalar_type()), (var + eps).rsqrt().to(mean.scalar_type())};
}

Tensor batch_norm_elemt(const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias, const Tensor& mean, const Tensor& invstd,
                        double) {
  Tensor y = (wide(input) - as_channels(mean, input)) * as_channels(invstd, input);
  if (is_given(weight)) {
    y = y * as_channels(*weight, input);
  }
  if (is_given(bias)) {
    y = y + as_channels(*bias, input);
  }
  return y.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, bool, bool, bool) {
  const std::vector<int64_t> dims = other_dims(input);
  const Tensor dy = wide(grad);
  const Tensor sum = dy.sum(dims);
  const Tensor product = (dy * (wide(input) - as_channels(mean, input))).sum(dims);
  const at::ScalarType dtype = is_given(weight) ? weight->scalar_type() : mean.scalar_type();
  return {sum, product, (product * invstd).to(dtype), sum.to(dtype)};
}

Tensor batch_norm_backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, const OptionalTensor& weight,
                                 const Tensor& sum, const Tensor& product, const Tensor& counts) {
  const Tensor n = counts.sum().to(mean.scalar_type());
  const Tensor centered = wide(input) - as_channels(mean, input);
  Tensor dx = wide(grad) - as_channels(sum / n, input) -
              centered * as_channels(invstd.square() * product / n, input);
  dx = dx * as_channels(invstd, input);
  if (is_given(weight)) {
    dx = dx * as_channels(*weight, input);
  }
  return dx.to(input.scalar_type());
}

}  // namespace

OwnKernels sync_batch_norm_kernels() {
  using c10::KernelFunction;
  return {
      {"aten::batch_norm_stats", KernelFunction::makeFromUnboxedRuntimeFunction(&batch_norm_stats)},
      {"aten::batch_norm_gather_stats_with_counts",
       KernelFunction::makeFromUnboxedRuntimeFunction(&batch_norm_gather_stats_with_counts)},
      {"aten::batch_norm_elemt", KernelFunction::makeFromUnboxedRuntimeFunction(&batch_norm_elemt)},
      {"aten::batch_norm_backward_reduce",
       KernelFunction::makeFromUnboxedRuntimeFunction(&batch_norm_backward_reduce)},
      {"aten::batch_norm_backward_elemt",
       KernelFunction::makeFromUnboxedRuntimeFunction(&batch_norm_backward_elemt)},
  };
}

}  // namespace standin
