"""The mathematics in plain differentiable PyTorch: slow, and right to any order of derivative.

Computes in float64 and uses no operator of ours. Tests and benchmarks compare with it, and
:mod:`syncbn.functional` takes it where a backward pass is itself to be differentiated.

Formulas: Ioffe and Szegedy, "Batch Normalization" (2015), with the sums taken over all ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from syncbn.ops import formulas, masks, tensors


def _of_this_rank(values: Tensor) -> Tensor:
    return values


def _normalize(
    input: Tensor, eps: float, total: Callable[[Tensor], Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return xhat, 1/std per channel, and the number of values per channel."""
    dims = [d for d in range(input.dim()) if d != 1]
    x = input.to(torch.float64)
    local_count = x.new_full((1,), input.numel() / input.size(1))
    if mask is not None:
        x, local_count = masks.clear(x, mask), mask.sum(dtype=x.dtype).view(1)
    totals = total(torch.cat([x.sum(dims), local_count]))
    count = totals[-1:].clamp(min=1)
    centered = x - tensors.per_channel(totals[:-1] / count, x)
    if mask is not None:
        centered = masks.clear(centered, mask)
    variance = total((centered * centered).sum(dims)) / count
    invstd = (variance + eps).rsqrt()
    return centered * tensors.per_channel(invstd, x), invstd, count


def batch_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    total: Callable[[Tensor], Tensor] = _of_this_rank,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize a batch by the statistics of the group.

    Args:
        input: Shape (N, C, ...), any floating dtype.
        weight: Shape [C], or None for 1.
        bias: Shape [C], or None for 0.
        eps: Added to the biased variance.
        total: Sums a vector over the ranks that share statistics, and can be differentiated.
        mask: bool, the shape of ``input`` without channels: positions that count; None for all. The
            others are normalized to 0, to which the bias is added.

    Returns:
        Shape of ``input``, float64.
    """
    output, _, _ = _normalize(input, eps, total, mask)
    if weight is not None:
        output = output * tensors.per_channel(weight.to(output.dtype), output)
    if bias is not None:
        output = output + tensors.per_channel(bias.to(output.dtype), output)
    return output


def normalize_again(input: Tensor, mean: Tensor, constants: Tensor) -> Tensor:
    """Compute what the operators normalized an input to, before an activation.

    Rounded as they round it, so that it has the sign that they saw.

    Args:
        input: Shape (N, C, ...).
        mean: float64 [C].
        constants: float64 [2C], of :func:`syncbn.ops.batch_norm.batch_norm_apply`.

    Returns:
        Shape and dtype of ``input``.
    """
    if not tensors.has_operators(input.device):
        return formulas.multiply_add(input, mean, *constants.chunk(2)).to(input.dtype)
    dtype = tensors.compute_dtype(input)
    center, scale, shift = (
        tensors.per_channel(values.to(dtype), input) for values in (mean, *constants.chunk(2))
    )
    # The product of two float32 is exact in float64.
    z = (input.to(dtype) - center).double() * scale.double() + shift.double()
    return z.to(dtype).to(input.dtype)


def batch_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    eps: float,
    total: Callable[[Tensor], Tensor] = _of_this_rank,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`batch_norm` as differentiable expressions; three all-reduces.

    Args:
        grad_output: Gradient of the output, shape of ``input``.
        input: Shape (N, C, ...).
        weight: Shape [C], or None for 1.
        eps: Added to the biased variance.
        total: Sums a vector over the ranks that share statistics, and can be differentiated.
        mask: That of :func:`batch_norm`; ``grad_output`` is 0 at the other positions.

    Returns:
        Gradients of input (its dtype and shape; of the sum over all ranks), of weight and of bias
        ([C], float64; of this rank alone).
    """
    xhat, invstd, count = _normalize(input, eps, total, mask)
    dims = [d for d in range(input.dim()) if d != 1]
    dy = grad_output.to(xhat.dtype)
    grad_bias, grad_weight = dy.sum(dims), (dy * xhat).sum(dims)
    means = total(torch.cat([grad_bias, grad_weight])) / count
    mean_dy, mean_dy_xhat = (tensors.per_channel(mean, dy) for mean in means.chunk(2))
    scale = invstd if weight is None else invstd * weight.to(dy.dtype)
    grad_input = dy - mean_dy - xhat * mean_dy_xhat
    if mask is not None:
        grad_input = masks.clear(grad_input, mask)
    grad_input = grad_input * tensors.per_channel(scale, dy)
    return grad_input.to(input.dtype), grad_weight, grad_bias
