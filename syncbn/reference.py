"""The mathematics in plain differentiable PyTorch: slow, and right to any order of derivative.

Computes in float64, or in float32 on a device without it, and uses no operator of ours. Tests and
benchmarks compare with it, and :mod:`syncbn.functional` takes it where a backward pass is itself to
be differentiated.

Formulas: Ioffe and Szegedy, "Batch Normalization" (2015), with the sums taken over all ranks.
"""

from typing import Any

import torch
from torch import Tensor

from syncbn import devices, exchange, layout, masks, plain
from syncbn.collectives import GroupReference, ProcessGroup
from syncbn.identity import ANONYMOUS, Identity

__all__ = ["batch_norm", "batch_norm_backward", "normalize_again"]


class _SumOverRanks(torch.autograd.Function):
    """The sum over the group's ranks, differentiable to any order: its gradient is itself."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup, layer: Identity) -> Tensor:
        """Sum a vector over the ranks."""
        ctx.group, ctx.layer = GroupReference(group), layer
        return exchange.sum_values(values, group, layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradients over the ranks."""
        group = exchange.group_held(ctx.group, ctx.layer)
        return _SumOverRanks.apply(grad, group, ctx.layer), None, None


def _sum_over_group(values: Tensor, group: ProcessGroup | None, layer: Identity) -> Tensor:
    if group is None:
        return values
    summed: Tensor = _SumOverRanks.apply(values, group, layer)
    return summed


def _normalize(
    input: Tensor, eps: float, group: ProcessGroup | None, layer: Identity, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return xhat, 1/std per channel, and the number of values per channel."""
    dims = [d for d in range(input.dim()) if d != 1]
    x = input.to(devices.widest(input.device))
    local_count = x.new_full((1,), input.numel() / input.size(1))
    if mask is not None:
        x, local_count = masks.clear(x, mask), mask.sum(dtype=x.dtype).view(1)
    totals = _sum_over_group(torch.cat([x.sum(dims), local_count]), group, layer)
    count = totals[-1:].clamp(min=1)
    centered = x - layout.per_channel(totals[:-1] / count, x)
    if mask is not None:
        centered = masks.clear(centered, mask)
    variance = _sum_over_group((centered * centered).sum(dims), group, layer) / count
    invstd = (variance + eps).rsqrt()
    return centered * layout.per_channel(invstd, x), invstd, count


def batch_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    group: ProcessGroup | None = None,
    layer: Identity = ANONYMOUS,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize a batch by the statistics of the group.

    Args:
        input: Shape (N, C, ...), any floating dtype.
        weight: Shape [C], or None for 1.
        bias: Shape [C], or None for 0.
        eps: Added to the biased variance.
        group: The ranks that share statistics, or None for this process alone.
        layer: Whose output it is, for errors.
        mask: bool, the shape of ``input`` without channels: places that count; None for all. The
            others are normalized to 0, to which the bias is added.

    Returns:
        Shape of ``input``; float64, or float32 on a device without it.
    """
    output, _, _ = _normalize(input, eps, group, layer, mask)
    if weight is not None:
        output = output * layout.per_channel(weight.to(output.dtype), output)
    if bias is not None:
        output = output + layout.per_channel(bias.to(output.dtype), output)
    return output


def normalize_again(input: Tensor, mean: Tensor, constants: Tensor) -> Tensor:
    """Compute what the operators normalized an input to, before an activation.

    Rounded as they round it, so that it has the sign that they saw.

    Args:
        input: Shape (N, C, ...).
        mean: float64 [C], on the CPU if the device has no float64, as ``constants``.
        constants: float64 [2C], of :func:`syncbn.ops.batch_norm_apply`.

    Returns:
        Shape and dtype of ``input``.
    """
    dtype = layout.compute_dtype(input)
    center, scale, shift = (
        layout.per_channel(values.to(dtype).to(input.device), input)
        for values in (mean, *constants.chunk(2))
    )
    if not devices.has_operators(input.device):
        return plain.multiply_add(input, center, scale, shift).to(input.dtype)
    # The product of two float32 is exact in float64.
    z = (input.to(dtype) - center).double() * scale.double() + shift.double()
    return z.to(dtype).to(input.dtype)


def batch_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    eps: float,
    group: ProcessGroup | None = None,
    layer: Identity = ANONYMOUS,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`batch_norm` as differentiable expressions; three all-reduces.

    Args:
        grad_output: Gradient of the output, shape of ``input``.
        input: Shape (N, C, ...).
        weight: Shape [C], or None for 1.
        eps: Added to the biased variance.
        group: The ranks that share statistics, or None for this process alone.
        layer: Whose gradients they are, for errors.
        mask: That of :func:`batch_norm`; ``grad_output`` is 0 at the other places.

    Returns:
        Gradients of input (its dtype and shape; of the sum over all ranks), of weight and of bias
        ([C], in the dtype of :func:`batch_norm`; of this rank alone).
    """
    xhat, invstd, count = _normalize(input, eps, group, layer, mask)
    dims = [d for d in range(input.dim()) if d != 1]
    dy = grad_output.to(xhat.dtype)
    grad_bias, grad_weight = dy.sum(dims), (dy * xhat).sum(dims)
    means = _sum_over_group(torch.cat([grad_bias, grad_weight]), group, layer) / count
    mean_dy, mean_dy_xhat = means.chunk(2)
    scale = invstd if weight is None else invstd * weight.to(dy.dtype)
    grad_input = dy - layout.per_channel(mean_dy, dy) - xhat * layout.per_channel(mean_dy_xhat, dy)
    if mask is not None:
        grad_input = masks.clear(grad_input, mask)
    grad_input = grad_input * layout.per_channel(scale, dy)
    return grad_input.to(input.dtype), grad_weight, grad_bias
