"""The operators of csrc, by handles that are looked up once.

csrc/ops.cpp holds their contract. None of them communicates or has an autograd formula. On devices
without operators of csrc, :mod:`syncbn.ops.fallback` has them. A ``mask`` is a result of
:func:`syncbn.ops.masks.as_positions`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from syncbn import _compat
from syncbn.ops import fallback, masks, tensors
from syncbn.ops.formulas import check_more_than_one_value

__all__ = [
    "AbortedError",
    "Operators",
    "PassesDifferError",
    "around",
    "check_arguments",
    "check_more_than_one_value",
    "in_its_class",
    "usual",
]


def check_arguments(
    input: Tensor, *others: Any, mask: Tensor | None = None, training: bool = True
) -> None:
    """Raise TypeError or ValueError for tensors that a pass does not take.

    ``others`` are :meth:`syncbn.ops.arguments.Arguments.for_checks`.
    """
    try:
        _OVERLOADS["check_arguments"](input, *others, mask=mask, training=training)
    except RuntimeError as error:
        raise in_its_class(error) from None


# Fake kernels. They run too if some of the tensors are on meta, and raise the error then.


def _check_devices(*operands: Any) -> None:
    devices = {str(operand.device) for operand in operands if isinstance(operand, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"expected all tensors on one device, but got {sorted(devices)}")


@torch.library.register_fake("syncbn::batch_norm_stats")
def _(input: Tensor, tail: Tensor | None = None, *operands: Any) -> Tensor:
    if not isinstance(input, _compat.FakeTensor):
        check_arguments(input, *operands[:7], mask=(*operands[7:], None)[0])
    size = 2 * input.size(1) + (1 if tail is None else 4)
    return input.new_empty(size, dtype=torch.float64)


def _fake_apply(input: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    _check_devices(input, *operands)
    mean, invstd, count = (
        input.new_empty(size, dtype=torch.float64) for size in (input.size(1), input.size(1), 1)
    )
    return torch.empty_like(input), mean, invstd, count


@torch.library.register_fake("syncbn::batch_norm_forward")
def _(input: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    if not isinstance(input, _compat.FakeTensor):
        check_arguments(input, *operands[:6], *operands[7:8], mask=(*operands[11:], None)[0])
    return _fake_apply(input, *operands)


@torch.library.register_fake("syncbn::batch_norm_apply")
def _(input: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    return _fake_apply(input, *operands[:9], *operands[10:])  # a status is on the CPU


def _fake_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype = torch.float64,
    bias_dtype: torch.dtype = torch.float64,
    tail: Tensor | None = None,
    *operands: Any,
) -> tuple[Tensor, ...]:
    _check_devices(grad_output, input, mean, invstd, *operands)
    channels = input.size(1)
    return (
        mean.new_empty(2 * channels + (0 if tail is None else 4)),
        input.new_empty(channels, dtype=weight_dtype),
        input.new_empty(channels, dtype=bias_dtype),
    )


torch.library.register_fake("syncbn::batch_norm_backward_reduce", _fake_reduce)


@torch.library.register_fake("syncbn::batch_norm_backward_reduce_dz")
def _(grad_output: Tensor, input: Tensor, *operands: Any) -> Any:
    return *_fake_reduce(grad_output, input, *operands), torch.empty_like(input)


@torch.library.register_fake("syncbn::batch_norm_backward_apply")
def _(grad_output: Tensor, input: Tensor, *operands: Any) -> Tensor:
    _check_devices(grad_output, input, *operands[:6], *operands[7:])  # a status is on the CPU
    return torch.empty_like(input)


@torch.library.register_fake("syncbn::verify_sums")
def _(sums: Tensor, *_: Any) -> Tensor:
    return sums.new_empty(sums.size(0) - 3)


@torch.library.register_fake("syncbn::batch_norm_backward")
def _(grad_output: Tensor, input: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    _check_devices(input, *operands)
    mean, invstd, _, _, *dtypes = operands[:6]
    _, *gradients = _fake_reduce(grad_output, input, mean, invstd, *dtypes)
    return torch.empty_like(input), *gradients


_OVERLOADS = {
    name: getattr(torch.ops.syncbn, name).default
    for name in ("check_arguments", "verify_sums", *fallback.OPERATORS)
}


class Operators(NamedTuple):
    """The operators of a pass. Each takes its operands by position."""

    # This rank's message: sum of x, sum of x² and number of values, float64 [2C+1].
    batch_norm_stats: Callable[..., Tensor]
    # Output, mean [C], invstd [C] and count [1], by the sums of the group; updates the running
    # statistics.
    batch_norm_apply: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    # This rank's sums of dz and dz·xhat, float64 [2C], and grad_weight and grad_bias [C].
    batch_norm_backward_reduce: Callable[..., tuple[Tensor, Tensor, Tensor]]
    # The same, and dz.
    batch_norm_backward_reduce_dz: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    # The gradient of the input, by the sums of the group.
    batch_norm_backward_apply: Callable[..., Tensor]
    # In a single process, as batch_norm_apply, by the statistics of the input.
    batch_norm_forward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    # In a single process, the gradients of input, weight and bias.
    batch_norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    # Sums over all ranks without their tail; NaN on CUDA if they are inconsistent.
    verify_sums: Callable[..., Tensor]


# Without a mask, a dispatch mode, or a counter of batches of another dtype than int64.
usual = Operators(*(_compat.handle_of(_OVERLOADS[name]) for name in Operators._fields))


def around(mask: Tensor | None) -> Operators:
    """Return the operators for all other calls, with a mask or None."""
    return Operators(*(functools.partial(_run, name, mask) for name in Operators._fields))


class AbortedError(RuntimeError):
    """Sums over all ranks hold the message of a rank that has aborted."""


class PassesDifferError(RuntimeError):
    """Sums over all ranks hold messages of different passes."""


# Operators against the stable ABI raise RuntimeError and nothing else.
_CLASSES = {
    "CUDA out of memory.": torch.OutOfMemoryError,  # which programs look for
    "another rank of the process group aborted": AbortedError,
    "the ranks of the process group run different passes": PassesDifferError,
}
_KINDS = {"TypeError": TypeError, "ValueError": ValueError}  # csrc/common/checks.h


def in_its_class(error: Exception) -> Exception:
    """Return the error of an operator in the class that its text names; others as they are."""
    if type(error) is not RuntimeError:
        return error
    kind, _, text = str(error).partition(": ")
    if kind in _KINDS:
        return _KINDS[kind](text)
    for beginning, cls in _CLASSES.items():
        if str(error).startswith(beginning):
            return cls(str(error))
    return error


# The index of the counter of batches among the operands.
_COUNTERS = {"batch_norm_apply": 6, "batch_norm_forward": 5}


def _run(name: str, mask: Tensor | None, *operands: Any) -> Any:
    """Call an operator, with all that Python has to do for it."""
    index = _COUNTERS.get(name, 0)
    count = operands[index] if index else None
    if count is not None and not (count.dtype in (torch.int64, torch.bool) or count.is_complex()):
        before, momentum = count.to(torch.int64), operands[index + 1]
        if momentum is None and type(count) is Tensor and count.is_cpu and (count != before).any():
            momentum = 1 / (float(count) + 1)  # the operator averages over whole batches
        after = before.clone()
        results = _run(name, mask, *operands[:index], after, momentum, *operands[index + 2 :])
        count.add_(after - before)
        return results
    written: list[bool] = []
    if _compat.allows_mutation_of_saved():
        written = _compat.arguments_written(_OVERLOADS[name])
    if not any(written):
        return _call(name, mask, operands)
    # The mode, which does not take the operator, has to see the writes.
    for operand, is_written in zip(operands, written, strict=False):
        if is_written and operand is not None:
            operand.copy_(operand)
    with _compat.without_dispatch_modes():
        return _call(name, mask, operands)


def _call(name: str, mask: Tensor | None, operands: tuple[Any, ...]) -> Any:
    if mask is None:
        return _OVERLOADS[name](*operands)
    if _takes_mask(mask):
        return _OVERLOADS[name](*operands, mask=mask)
    return masks.call_filled(_OVERLOADS, name, operands, mask)


def _takes_mask(mask: Tensor) -> bool:
    """Whether the operators of the mask's device take it; CUDA kernels do not."""
    return not (mask.is_cuda and tensors.has_operators(mask.device))


def _with_memory(operator: Any) -> Any:
    """Return the operator for tensors that are zero without memory, as some gradients are.

    The dispatcher would expand one value, which operators of csrc do not take.
    """
    written = _compat.arguments_written(operator)

    def call(*operands: Any, **keywords: Any) -> Any:
        for operand, is_written in zip(operands, written, strict=False):
            if is_written and _compat.is_zero_tensor(operand):
                raise TypeError(
                    "expected a tensor that can be written to, but got a zero tensor, which has no "
                    "memory; call .clone() first"
                )
        operands, keywords = tree_map(_materialized, (operands, keywords))
        return operator(*operands, **keywords)

    return call


def _materialized(operand: Any) -> Any:
    return operand.clone() if _compat.is_zero_tensor(operand) else operand


# Their results never require a gradient: the callers give it.
_library = torch.library.Library("syncbn", "IMPL", "Autograd")
for _name in ("verify_sums", *fallback.OPERATORS):
    _library.impl(_name, torch.library.fallthrough_kernel)

_zero_tensors = torch.library.Library("syncbn", "IMPL", "ZeroTensor")
for _name, _operator in _OVERLOADS.items():
    _zero_tensors.impl(_name, _with_memory(_operator))
