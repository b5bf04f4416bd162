"""Masks of positions that count in no statistics, and their use where operators take none."""

from typing import TypeVar

import torch
import torch.fx
from torch import Tensor

from syncbn.ops import fallback, tensors

TensorT = TypeVar("TensorT", Tensor, Tensor | None)


def broadcasts(mask: Tensor, input: Tensor) -> bool:
    """Whether a mask fits the input's positions: (N, 1, ...) or (N, ...), or with sizes of 1."""
    if mask.dim() == input.dim():
        positions = (*input.shape[:1], 1, *input.shape[2:])
    else:
        positions = (*input.shape[:1], *input.shape[2:])
    return len(positions) == mask.dim() and all(
        size in (1, full) for size, full in zip(mask.shape, positions, strict=True)
    )


def as_positions(mask: Tensor, input: Tensor) -> Tensor:
    """Return a checked mask as operators take it: contiguous, with the input's shape without C."""
    if mask.dim() == input.dim():
        mask = mask.squeeze(1)
    return mask.expand(input.shape[:1] + input.shape[2:]).contiguous()


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


def clear_(tensor: Tensor, positions: Tensor) -> None:
    """Set a new tensor to zero at masked positions, in place."""
    tensor.masked_fill_(~positions.unsqueeze(1), 0.0)


@torch.no_grad()
def fill(input: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input with masked positions filled, and the filling: float64 [C].

    A channel's filling is a value near its mean, which costs its sums no accuracy: the mean of the
    first valid value of each sample, rounded to the input's dtype.
    """
    fallback.check_device(input.device)
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


def take_out_(message: Tensor, filling: Tensor, positions: Tensor) -> None:
    """Subtract the filled values from a message of :func:`syncbn.ops.batch_norm_stats`."""
    number = (positions.numel() - positions.sum()).to(torch.float64).view(1)
    filled = torch.cat([filling * number, filling.square() * number, number])
    message[: filled.size(0)] -= filled
