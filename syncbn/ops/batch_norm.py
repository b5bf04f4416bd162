"""The operators as typed Python calls.

csrc/ops.cpp holds their contract. None of them communicates or has an autograd formula. On devices
without operators of csrc, :mod:`syncbn.ops.fallback` has them. A ``mask`` is a result of
:func:`syncbn.ops.masks.as_positions`. Operators take a mask on CPUs; for other devices the
functions here fill masked positions before the sums and clear them in outputs.
"""

from typing import Any

import torch
from torch import Tensor

from syncbn import _compat
from syncbn.ops import masks, tensors
from syncbn.ops.fallback import ONE_VALUE

__all__ = [
    "ONE_VALUE",
    "AbortedError",
    "PassesDifferError",
    "batch_norm_apply",
    "batch_norm_backward",
    "batch_norm_backward_apply",
    "batch_norm_backward_reduce",
    "batch_norm_backward_reduce_dz",
    "batch_norm_forward",
    "batch_norm_stats",
    "check_more_than_one_value",
]


def _check_devices(*operands: Any) -> None:
    """Raise RuntimeError where one tensor on the meta device has brought the others along."""
    devices = {str(operand.device) for operand in operands if isinstance(operand, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"syncbn: expected all tensors on one device, but got {sorted(devices)}")


@torch.library.register_fake("syncbn::batch_norm_stats")
def _(input: Tensor, fingerprint: float | None = None, *others: Any) -> Tensor:
    _check_devices(input, *others)
    size = 2 * input.size(1) + (1 if fingerprint is None else 4)
    return input.new_empty(size, dtype=torch.float64)


def _fake_apply(input: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    _check_devices(input, *operands)
    mean, invstd, count = (
        input.new_empty(size, dtype=torch.float64) for size in (input.size(1), input.size(1), 1)
    )
    return torch.empty_like(input), mean, invstd, count


torch.library.register_fake("syncbn::batch_norm_forward", _fake_apply)


@torch.library.register_fake("syncbn::batch_norm_apply")
def _(input: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    return _fake_apply(input, *operands[:9], *operands[10:])  # a status is on the CPU


def _fake_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    *operands: Any,
) -> tuple[Tensor, ...]:
    _check_devices(grad_output, input, mean, invstd, *operands)
    weight_dtype, bias_dtype, fingerprint = (*operands, None)[:3]
    channels = input.size(1)
    return (
        mean.new_empty(2 * channels + (0 if fingerprint is None else 4)),
        input.new_empty(channels, dtype=weight_dtype),
        input.new_empty(channels, dtype=bias_dtype),
    )


torch.library.register_fake("syncbn::batch_norm_backward_reduce", _fake_reduce)


@torch.library.register_fake("syncbn::batch_norm_backward_reduce_dz")
def _(grad_output: Tensor, input: Tensor, *operands: Any) -> Any:
    return *_fake_reduce(grad_output, input, *operands), torch.empty_like(input)


@torch.library.register_fake("syncbn::batch_norm_backward_apply")
def _(grad_output: Tensor, input: Tensor, *operands: Any) -> Tensor:
    operands = (*operands[:6], *operands[7:])  # a status is on the CPU
    _check_devices(grad_output, input, *operands)
    return torch.empty_like(input)


@torch.library.register_fake("syncbn::batch_norm_backward")
def _(grad_output: Tensor, input: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    mean, invstd, weight, count, *others = operands
    _, *gradients = _fake_reduce(grad_output, input, mean, invstd, *others)
    _check_devices(input, weight, count)
    return torch.empty_like(input), *gradients


# Looked up once: each attribute costs as much as a check.
_batch_norm_stats = torch.ops.syncbn.batch_norm_stats.default
_batch_norm_apply = torch.ops.syncbn.batch_norm_apply.default
_batch_norm_backward_reduce = torch.ops.syncbn.batch_norm_backward_reduce.default
_batch_norm_backward_reduce_dz = torch.ops.syncbn.batch_norm_backward_reduce_dz.default
_batch_norm_backward_apply = torch.ops.syncbn.batch_norm_backward_apply.default
_batch_norm_forward = torch.ops.syncbn.batch_norm_forward.default
_batch_norm_backward = torch.ops.syncbn.batch_norm_backward.default


# Operands for a residual and an activation; without them an operator does nothing more.
Fused = Tensor | float | None


class AbortedError(RuntimeError):
    """Sums over all ranks hold the message of a rank that has aborted."""


class PassesDifferError(RuntimeError):
    """Sums over all ranks hold messages of different passes."""


# Operators against the stable ABI raise RuntimeError and nothing else.
_CLASSES = {
    "CUDA out of memory.": torch.OutOfMemoryError,  # which programs look for
    "another rank of the process group aborted": AbortedError,
    "the ranks of the process group run different passes": PassesDifferError,
    ONE_VALUE: ValueError,
}


def _in_its_class(error: RuntimeError) -> Exception:
    for beginning, kind in _CLASSES.items():
        if str(error).startswith(beginning):
            return kind(str(error))
    return error


def _call(
    operator: Any, operands: tuple[Any, ...], masked: dict[str, Tensor], writes: bool = False
) -> Any:
    """Call an operator, which may write to its operands; its errors get their class."""
    if writes and _compat.allows_mutation_of_saved():
        # Its mode, which does not take the operator, has to see the writes.
        for operand, is_written in zip(operands, _compat.arguments_written(operator), strict=False):
            if is_written and operand is not None:
                operand.copy_(operand)
        with _compat.without_dispatch_modes():
            return _call(operator, operands, masked)
    try:
        return operator(*operands, **masked)
    except RuntimeError as error:
        raise _in_its_class(error) from None


def _as_keyword(mask: Tensor, input: Tensor) -> dict[str, Tensor]:
    """Return the mask for an operator; nothing where the operators take none."""
    return {"mask": mask} if input.is_cpu and tensors.has_operators(input.device) else {}


def check_more_than_one_value(totals: Tensor, channels: int) -> None:
    """Raise ValueError if sums are of one value per channel, where the host may look at them."""
    can_look = type(totals) is Tensor and not (totals.is_cuda or totals.is_meta)
    if can_look and totals[2 * channels] == 1:
        raise ValueError(ONE_VALUE)


def batch_norm_stats(
    input: Tensor,
    fingerprint: float | None = None,
    next_size: float = 0.0,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute this rank's message: sum of x, sum of x² and number of values, float64 [2C+1].

    With a fingerprint [2C+4], ending with fingerprint, next_size and its square.
    """
    masked, filling = {} if mask is None else _as_keyword(mask, input), None
    if mask is not None and not masked:
        input, filling = masks.fill(input, mask)
    operands = (input, fingerprint, next_size)
    message: Tensor = _call(_batch_norm_stats, operands, masked)
    if mask is not None and filling is not None:
        masks.take_out_(message, filling, mask)
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
    fingerprint_sum: float | None = None,
    status: Tensor | None = None,
    *fused: Fused,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize, and update the running statistics: output, mean [C], invstd [C], count [1].

    ``num_batches_tracked`` may have any dtype here. ``fused`` are residual, activation,
    negative_slope and constants, which are written.
    """
    masked = {} if mask is None else _as_keyword(mask, input)
    counter = num_batches_tracked
    if counter is not None and counter.dtype is not torch.int64:
        counter = counter.to(torch.int64)
    vectors = (weight, bias, running_mean, running_var, counter)
    numbers = (momentum, eps, fingerprint_sum, status)
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _call(
        _batch_norm_apply, (input, totals, *vectors, *numbers, *fused), masked, writes=True
    )
    if counter is not num_batches_tracked:
        num_batches_tracked.copy_(counter)  # type: ignore[union-attr,arg-type]
    if mask is not None and not masked:
        masks.clear_(results[0], mask)
    return results


def batch_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    *fused: Fused,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do as :func:`batch_norm_apply`, by the statistics of the input."""
    masked = {} if mask is None else _as_keyword(mask, input)
    vectors = (weight, bias, running_mean, running_var, num_batches_tracked)
    if mask is not None and not masked:
        totals = batch_norm_stats(input, mask=mask)
        numbers = (momentum, eps, None, None)
        return batch_norm_apply(input, totals, *vectors, *numbers, *fused, mask=mask)
    counter = num_batches_tracked
    if counter is not None and counter.dtype is not torch.int64:
        counter = counter.to(torch.int64)
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _call(
        _batch_norm_forward,
        (input, *vectors[:4], counter, momentum, eps, *fused),
        masked,
        writes=True,
    )
    if counter is not num_batches_tracked:
        num_batches_tracked.copy_(counter)  # type: ignore[union-attr,arg-type]
    return results


def batch_norm_backward_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype = torch.float64,
    bias_dtype: torch.dtype = torch.float64,
    fingerprint: float | None = None,
    next_size: float = 0.0,
    *fused: Fused,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this rank's sums of dz and dz·xhat, float64 [2C], and grad_weight, grad_bias [C].

    dz is dy, or its product with the derivative of an activation: ``fused`` are constants,
    activation and negative_slope. With a fingerprint the sums are [2C+4], ending with 0,
    fingerprint, next_size and its square.
    """
    masked = {} if mask is None else _as_keyword(mask, input)
    if mask is not None and not masked:
        # Masked positions contribute nothing: dy is 0 there.
        grad_output, (input, _) = masks.clear(grad_output, mask), masks.fill(input, mask)
    operands = (grad_output, input, mean, invstd, weight_dtype, bias_dtype, fingerprint, next_size)
    results: tuple[Tensor, Tensor, Tensor] = _call(
        _batch_norm_backward_reduce, (*operands, *fused), masked
    )
    return results


def batch_norm_backward_reduce_dz(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    fingerprint: float | None,
    next_size: float,
    *fused: Fused,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do as :func:`batch_norm_backward_reduce`, and store dz.

    ``fused`` are constants, activation, negative_slope, residual and output.
    """
    masked = {} if mask is None else _as_keyword(mask, input)
    if mask is not None and not masked:
        grad_output, (input, _) = masks.clear(grad_output, mask), masks.fill(input, mask)
        *source, residual, output = fused
        if isinstance(residual, Tensor):  # an output has zeros there
            residual = masks.clear(residual, mask)
        fused = (*source, residual, output)
    operands = (grad_output, input, mean, invstd, weight_dtype, bias_dtype, fingerprint, next_size)
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _call(
        _batch_norm_backward_reduce_dz, (*operands, *fused), masked
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
    fingerprint_sum: float | None = None,
    status: Tensor | None = None,
    *fused: Fused,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of the input from the sums of the whole group.

    ``fused`` are constants, activation and negative_slope.
    """
    masked = {} if mask is None else _as_keyword(mask, input)
    operands = (grad_output, input, mean, invstd, weight, sums, count, fingerprint_sum, status)
    grad_input: Tensor = _call(_batch_norm_backward_apply, (*operands, *fused), masked, writes=True)
    if mask is not None and not masked:
        masks.clear_(grad_input, mask)
    return grad_input


def batch_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    count: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    *fused: Fused,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, weight and bias in a single process.

    ``fused`` are constants, activation and negative_slope.
    """
    masked = {} if mask is None else _as_keyword(mask, input)
    saved, dtypes = (mean, invstd), (weight_dtype, bias_dtype)
    if mask is not None and not masked:
        sums, grad_weight, grad_bias = batch_norm_backward_reduce(
            grad_output, input, *saved, *dtypes, None, 0.0, *fused, mask=mask
        )
        grad_input = batch_norm_backward_apply(
            grad_output, input, *saved, weight, sums, count, None, None, *fused, mask=mask
        )
        return grad_input, grad_weight, grad_bias
    operands = (grad_output, input, *saved, weight, count, *dtypes, *fused)
    gradients: tuple[Tensor, Tensor, Tensor] = _call(_batch_norm_backward, operands, masked)
    return gradients


# Their results never require a gradient: the callers give it.
_library = torch.library.Library("syncbn", "IMPL", "Autograd")
_REDUCTIONS = ("stats", "backward_reduce", "backward_reduce_dz")
for _name in (*_REDUCTIONS, "apply", "backward_apply", "forward", "backward"):
    _library.impl(f"batch_norm_{_name}", torch.library.fallthrough_kernel)
