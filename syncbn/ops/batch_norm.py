"""The operators as Python calls.

csrc/ops.cpp holds their contract. None of them communicates or has an autograd formula. On devices
without operators of csrc, :mod:`syncbn.ops.fallback` has them. A ``mask`` is a result of
:func:`syncbn.ops.masks.as_positions`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from syncbn import _compat
from syncbn.ops import fallback, masks, tensors
from syncbn.ops.formulas import check_more_than_one_value

__all__ = [
    "AbortedError",
    "PassesDifferError",
    "batch_norm_apply",
    "batch_norm_backward",
    "batch_norm_backward_apply",
    "batch_norm_backward_reduce",
    "batch_norm_backward_reduce_dz",
    "batch_norm_forward",
    "batch_norm_stats",
    "check_arguments",
    "check_more_than_one_value",
    "verify_sums",
]


def check_arguments(
    input: Tensor, *others: Any, mask: Tensor | None = None, training: bool = True
) -> None:
    """Raise TypeError or ValueError for tensors that a pass does not take.

    ``others`` are :meth:`syncbn.ops.arguments.Arguments.for_checks`.
    """
    try:
        _OPERATORS["check_arguments"](input, *others, mask=mask, training=training)
    except RuntimeError as error:
        raise _in_its_class(error) from None


# Fake kernels. They run too if some of the tensors are on meta, and raise the error then.


def _check_devices(*operands: Any) -> None:
    devices = {str(operand.device) for operand in operands if isinstance(operand, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"expected all tensors on one device, but got {sorted(devices)}")


@torch.library.register_fake("syncbn::batch_norm_stats")
def _(
    input: Tensor,
    tail: Tensor | None = None,
    *operands: Any,
) -> Tensor:
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


# Looked up once: each attribute costs as much as a check.
_OPERATORS = {
    name: getattr(torch.ops.syncbn, name).default
    for name in ("check_arguments", "verify_sums", *fallback.OPERATORS)
}


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


def _in_its_class(error: RuntimeError) -> Exception:
    kind, _, text = str(error).partition(": ")
    if kind in _KINDS:
        return _KINDS[kind](text)
    for beginning, cls in _CLASSES.items():
        if str(error).startswith(beginning):
            return cls(str(error))
    return error


def _call(name: str, operands: tuple[Any, ...], mask: Tensor | None = None) -> Any:
    """Call an operator; its errors get their class."""
    try:
        if mask is None:
            return _OPERATORS[name](*operands)
        if _takes_mask(mask):
            return _OPERATORS[name](*operands, mask=mask)
        return masks.call_filled(_OPERATORS, name, operands, mask)
    except RuntimeError as error:
        raise _in_its_class(error) from None


def _takes_mask(mask: Tensor) -> bool:
    return not (mask.is_cuda and tensors.has_operators(mask.device))


def _write(
    name: str, operands: tuple[Any, ...], mask: Tensor | None = None, counter: int = -1
) -> Any:
    """Do as :func:`_call`, with an operator that writes to its operands.

    ``counter`` is the index of the counter of batches, which may have any dtype; -1 for none.
    """
    count = None if counter < 0 else operands[counter]
    if count is not None and not (count.dtype in (torch.int64, torch.bool) or count.is_complex()):
        before, momentum = count.to(torch.int64), operands[counter + 1]
        if momentum is None and type(count) is Tensor and count.is_cpu and (count != before).any():
            momentum = 1 / (float(count) + 1)  # the operator averages over whole batches
        after = before.clone()
        operands = (*operands[:counter], after, momentum, *operands[counter + 2 :])
        results = _write(name, operands, mask)
        count.add_(after - before)
        return results
    if not _compat.allows_mutation_of_saved():
        return _call(name, operands, mask)
    # Its mode, which does not take the operator, has to see the writes.
    written = _compat.arguments_written(_OPERATORS[name])
    for operand, is_written in zip(operands, written, strict=False):
        if is_written and operand is not None:
            operand.copy_(operand)
    with _compat.without_dispatch_modes():
        return _call(name, operands, mask)


# The operators. csrc/ops.cpp names their operands and results.


def batch_norm_stats(*operands: Any, mask: Tensor | None = None) -> Tensor:
    """Compute this rank's message: sum of x, sum of x² and number of values, float64 [2C+1]."""
    return _call("batch_norm_stats", operands, mask)  # type: ignore[no-any-return]


def batch_norm_apply(
    *operands: Any, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize, and update the running statistics: output, mean [C], invstd [C], count [1]."""
    return _write("batch_norm_apply", operands, mask, counter=6)  # type: ignore[no-any-return]


def batch_norm_forward(
    *operands: Any, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do as :func:`batch_norm_apply`, by the statistics of the input."""
    return _write("batch_norm_forward", operands, mask, counter=5)  # type: ignore[no-any-return]


def batch_norm_backward_reduce(
    *operands: Any, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this rank's sums of dz and dz·xhat, float64 [2C], and grad_weight, grad_bias [C]."""
    return _call("batch_norm_backward_reduce", operands, mask)  # type: ignore[no-any-return]


def batch_norm_backward_reduce_dz(
    *operands: Any, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do as :func:`batch_norm_backward_reduce`, and store dz."""
    return _call("batch_norm_backward_reduce_dz", operands, mask)  # type: ignore[no-any-return]


def batch_norm_backward_apply(*operands: Any, mask: Tensor | None = None) -> Tensor:
    """Compute the gradient of the input from the sums of the whole group."""
    results = _write("batch_norm_backward_apply", operands, mask)
    return results  # type: ignore[no-any-return]


def batch_norm_backward(
    *operands: Any, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, weight and bias in a single process."""
    return _call("batch_norm_backward", operands, mask)  # type: ignore[no-any-return]


def verify_sums(*operands: Any) -> Tensor:
    """Return sums over all ranks without their tail; raise, or NaN on CUDA, if inconsistent."""
    return _write("verify_sums", operands)  # type: ignore[no-any-return]


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
for _name, _operator in _OPERATORS.items():
    _zero_tensors.impl(_name, _with_memory(_operator))
