"""Masks of positions that count in no statistics, and operators that take no mask."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

from syncbn.ops import formulas, tensors

TensorT = TypeVar("TensorT", Tensor, Tensor | None)


def as_positions(mask: Tensor, input: Tensor) -> Tensor:
    """Return a mask as operators take it: contiguous, with the input's shape without C.

    A mask that does not fit, (N, 1, ...) or (N, ...) or with sizes of 1, is returned as it is, and
    the operators refuse it.
    """
    positions = input.shape[:1] + input.shape[2:]
    given = mask.squeeze(1) if mask.dim() == input.dim() else mask
    fits = given.dim() == len(positions) and all(
        size in (1, full) for size, full in zip(given.shape, positions, strict=True)
    )
    return given.expand(positions).contiguous() if fits else mask


def clear(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return the tensor with zeros at masked positions, which have no gradient."""
    return torch.where(positions.unsqueeze(1), tensor, 0.0)


def clear_given(tensor: TensorT, mask: Tensor | None) -> TensorT:
    """Return the tensor with zeros where a mask, in the shape that the user gave, is false."""
    if tensor is None or mask is None:
        return tensor
    return clear(tensor, as_positions(mask, tensor))


# Symbolic tracing of a layer by itself makes a placeholder of its mask, which may stay None.
torch.fx.wrap("clear_given")


def call_filled(
    operators: Mapping[str, Callable[..., Any]], name: str, operands: Sequence[Any], mask: Tensor
) -> Any:
    """Call an operator that takes no mask: on CUDA, and torch's expressions on other devices.

    Masked positions are filled before sums, which are corrected, and cleared in outputs.
    ``operands`` are all operands but the mask.
    """
    operator = operators[name]
    first, *others = operands
    match name:
        case "batch_norm_stats":
            torch.ops.syncbn.check_arguments.default(first, *others[1:], mask=mask)
            filled, filling = fill(first, mask)
            return take_out(operator(filled, *others), filling, mask)
        case "batch_norm_forward":
            of_stats = (None, *others[:6], *others[7:8])
            totals = call_filled(operators, "batch_norm_stats", (first, *of_stats), mask)
            if not tensors.has_operators(first.device):
                formulas.check_more_than_one_value(totals, first.size(1))
            of_apply = (totals, *others[:7], None, None, *others[7:])
            return call_filled(operators, "batch_norm_apply", (first, *of_apply), mask)
        case "batch_norm_backward":
            given, (weight, count, *dtypes), activation = others[:3], others[3:7], others[7:]
            of_reduce = (*dtypes, None, *activation)
            sums, grad_weight, grad_bias = call_filled(
                operators, "batch_norm_backward_reduce", (first, *given, *of_reduce), mask
            )
            of_apply = (weight, sums, count, None, None, *activation)
            grad_input = call_filled(
                operators, "batch_norm_backward_apply", (first, *given, *of_apply), mask
            )
            return grad_input, grad_weight, grad_bias
        case "batch_norm_backward_reduce" | "batch_norm_backward_reduce_dz":
            if name == "batch_norm_backward_reduce_dz" and others[-2] is not None:
                others[-2] = clear(others[-2], mask)  # the residual; an output has zeros there
            # Masked positions contribute nothing: dy is 0 there.
            results = operator(clear(first, mask), fill(others[0], mask)[0], *others[1:])
            for dz in results[3:]:  # not 0 in a channel that is not finite
                dz.masked_fill_(~mask.unsqueeze(1), 0.0)
            return results
        case _:
            results = operator(*operands)
            output = results if isinstance(results, Tensor) else results[0]
            output.masked_fill_(~mask.unsqueeze(1), 0.0)
            return results


@torch.no_grad()
def fill(input: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input with masked positions filled, and the filling: float64 [C].

    A channel's filling is a value near its mean, which costs its sums no accuracy: the mean of the
    first valid value of each sample, rounded to the input's dtype.
    """
    num_samples, channels = input.shape[:2]
    if input.numel() == 0:
        return input, input.new_zeros(channels, dtype=torch.float64)
    values = input.reshape(num_samples, channels, -1)
    of_samples = positions.reshape(num_samples, 1, -1)
    first = of_samples.byte().argmax(2, keepdim=True)
    counts = of_samples.any(2)
    found = values.gather(2, first.expand(-1, channels, -1)).squeeze(2)
    found = torch.where(counts, found.to(torch.float64), 0.0)
    filling = (found.sum(0) / counts.sum().clamp(min=1)).to(input.dtype)
    filled = torch.where(positions.unsqueeze(1), input, tensors.per_channel(filling, input))
    return filled, filling.to(torch.float64)


def take_out(message: Tensor, filling: Tensor, positions: Tensor) -> Tensor:
    """Return a message of :func:`syncbn.ops.batch_norm_stats` without the filled values.

    The message itself does not change: a dispatch mode may keep it.
    """
    number = (positions.numel() - positions.sum()).to(torch.float64).view(1)
    filled = torch.cat([filling * number, filling.square() * number, number])
    return message - F.pad(filled, (0, message.size(0) - filled.size(0)))
