"""The operators as typed Python calls, and their fake kernels.

csrc/ops.cpp holds their contract. None of them communicates or has an autograd formula.
"""

import torch
from torch import Tensor

from syncbn import _extension as _extension  # registers the operators

__all__ = [
    "as_dense",
    "batch_norm_apply",
    "batch_norm_backward_apply",
    "batch_norm_backward_reduce",
    "batch_norm_stats",
    "cast",
]

# Looked up once: each attribute costs as much as a check.
_batch_norm_stats = torch.ops.syncbn.batch_norm_stats.default
_batch_norm_apply = torch.ops.syncbn.batch_norm_apply.default
_batch_norm_backward_reduce = torch.ops.syncbn.batch_norm_backward_reduce.default
_batch_norm_backward_apply = torch.ops.syncbn.batch_norm_backward_apply.default


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def as_dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return ``tensor`` in a layout that the operators take: its own, or that of ``like``.

    One with gaps, such as a slice, gets the memory format that torch's operators would give it.
    """
    like = tensor if like is None else like
    if like.is_contiguous():
        return tensor.contiguous()
    if _is_channels_last(like):
        if _is_channels_last(tensor):
            return tensor
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    channels_fastest = like.dim() in _CHANNELS_LAST and like.stride(1) == 1
    memory_format = _CHANNELS_LAST[like.dim()] if channels_fastest else torch.contiguous_format
    return tensor.contiguous(memory_format=memory_format)


def _is_channels_last(tensor: Tensor) -> bool:
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    if memory_format is None:
        return tensor.movedim(1, -1).is_contiguous()
    return tensor.is_contiguous(memory_format=memory_format)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``, but do not trace one that would return ``tensor`` itself.

    torch 2.11 loses the gradient of an output that such a call has returned: backward gets zeros.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def batch_norm_stats(input: Tensor) -> Tensor:
    """Compute this rank's message: sum of x, sum of x² and number of values, float64 [2C+1]."""
    message: Tensor = _batch_norm_stats(input)
    return message


def batch_norm_apply(
    input: Tensor,
    totals: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize, and update the running statistics: output, mean [C], invstd [C], count [1]."""
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _batch_norm_apply(
        input,
        totals,
        weight,
        bias,
        running_mean,
        running_var,
        num_batches_tracked,
        momentum,
        eps,
    )
    return results


def batch_norm_backward_reduce(
    grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this rank's sums of dy and dy·xhat, float64 [2C], and grad_weight, grad_bias [C]."""
    results: tuple[Tensor, Tensor, Tensor] = _batch_norm_backward_reduce(
        grad_output, input, mean, invstd, weight
    )
    return results


def batch_norm_backward_apply(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    """Compute the gradient of the input from the sums of the whole group."""
    grad_input: Tensor = _batch_norm_backward_apply(
        grad_output, input, mean, invstd, weight, sums, count
    )
    return grad_input


@torch.library.register_fake("syncbn::batch_norm_stats")
def _(input: Tensor) -> Tensor:
    return input.new_empty(2 * input.size(1) + 1, dtype=torch.float64)


@torch.library.register_fake("syncbn::batch_norm_apply")
def _(
    input: Tensor,
    totals: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = input.size(1)
    return (
        torch.empty_like(input),
        totals.new_empty(channels),
        totals.new_empty(channels),
        totals.new_empty(1),
    )


@torch.library.register_fake("syncbn::batch_norm_backward_reduce")
def _(
    grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    channels = input.size(1)
    grad_dtype = torch.float64 if weight is None else weight.dtype
    return (
        mean.new_empty(2 * channels),
        mean.new_empty(channels, dtype=grad_dtype),
        mean.new_empty(channels, dtype=grad_dtype),
    )


@torch.library.register_fake("syncbn::batch_norm_backward_apply")
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    return torch.empty_like(input)
