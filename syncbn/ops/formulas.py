"""The formulas of csrc/common/formulas.h as expressions of torch.

Constants of a channel are float64 [C]. ``center`` is the mean, rounded to the dtype that the values
are computed in: a mean far from zero costs no accuracy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from syncbn.ops import epilogue, tensors

# csrc/common/checks.h
ONE_VALUE = "Expected more than 1 value per channel when training, got 1 in the whole batch"


def statistics(totals: Tensor, count: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, 1/std and the sum of squared deviations, of a batch of ``count`` values.

    ``totals`` are the sums of x and of x², [2C].
    """
    sums, squares = totals.chunk(2)
    divisor = count.clamp(min=1)  # the sums of no values are zero
    mean = sums / divisor
    m2 = (squares - sums * mean).clamp(min=0)
    return mean, 1 / (m2 / divisor + eps).sqrt(), m2


def update_running(
    batch: tuple[Tensor, Tensor, Tensor], running: Sequence[Tensor | None], momentum: float | None
) -> None:
    """Move the running statistics toward a batch, as csrc/common/running.h does.

    A batch without values changes nothing. ``batch`` is its mean, its sum of squared deviations and
    its number of values per channel; ``running`` is mean, variance and number of batches, or None.
    """
    mean, m2, count = batch
    running_mean, running_var, num_batches_tracked = running
    has_values = count > 0
    factor: float | Tensor = 0.0 if momentum is None else momentum
    if num_batches_tracked is not None:
        num_batches_tracked.add_(
            has_values.to(num_batches_tracked.dtype).view_as(num_batches_tracked)
        )
        if momentum is None:
            tracked = num_batches_tracked.to(torch.float64).view(1)
            factor = 1 / tracked.clamp(min=1)
    if running_mean is None or running_var is None:
        return
    unbiased = m2 / (count - 1).clamp(min=1)
    old_mean, new_mean = _moved(running_mean, mean, factor)
    old_var, new_var = _moved(running_var, unbiased, factor)
    largest = torch.finfo(running_mean.dtype).max
    fits = (new_mean.abs() <= largest) & (new_var <= torch.finfo(running_var.dtype).max)
    is_valid = has_values & fits
    if momentum is None:
        old_mean, old_var = (t.masked_fill(has_values, torch.nan) for t in (old_mean, old_var))
    running_mean.copy_(torch.where(is_valid, new_mean, old_mean))
    running_var.copy_(torch.where(is_valid, new_var, old_var))


def _moved(running: Tensor, batch: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the old and the new values of running statistics, in float64."""
    old = running.to(torch.float64)
    return old, (1 - factor) * old + factor * batch


def normalize_constants(
    mean: Tensor, center: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return scale and shift: z = (x - center) * scale + shift."""
    scale = _scale(invstd, weight)
    shift = (center - mean) * scale
    return scale, shift if bias is None else shift + bias


def grad_input_constants(
    mean: Tensor, center: Tensor, invstd: Tensor, weight: Tensor | None, sums: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slope, shift and scale: dx = dz * scale + ((x - center) * slope + shift).

    ``sums`` are of dz and of dz * xhat, float64 [2C], over ``count`` values.
    """
    mean_dz, mean_dz_xhat = (sums / count.clamp(min=1)).chunk(2)
    scale = _scale(invstd, weight)
    negative = -scale
    slope = negative * invstd * mean_dz_xhat
    return slope, negative * mean_dz - (mean - center) * slope, scale


def _scale(invstd: Tensor, weight: Tensor | None) -> Tensor:
    return invstd if weight is None else invstd * weight


def multiply_add(input: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return (input - center) * scale + shift, in the dtype that the input is computed in.

    Each operation is rounded, so that a forward and a backward pass find the same values.
    """
    constants = torch.stack([center, scale, shift]).to(tensors.compute_dtype(input))
    center, scale, shift = (tensors.per_channel(values, input) for values in constants)
    return (tensors.cast(input, center.dtype) - center) * scale + shift


def check_more_than_one_value(totals: Tensor, channels: int) -> None:
    """Raise ValueError for sums of one value per channel, if the host can read them."""
    can_read = type(totals) is Tensor and not (totals.is_cuda or totals.is_meta)
    if can_read and totals[2 * channels] == 1:
        raise ValueError(ONE_VALUE)


def check_input_size(input: Tensor) -> None:
    """Raise ValueError for the input of a single process with one value per channel."""
    if input.dim() > 1 and input.numel() == input.size(1) > 0:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.size()}"
        )


def activation(z: Tensor, name: str | None, negative_slope: float, zero: float) -> Tensor:
    """Return the activation of z; a z up to ``zero`` counts as 0."""
    if name is None:
        return z
    if name == "relu":
        return torch.where(z <= zero, 0.0, z)
    if name == "leaky_relu":
        return torch.where(z > zero, z, z * negative_slope)
    if name == "silu":
        return z * torch.sigmoid(z)
    raise epilogue.unknown_activation(name)


def activation_gradient(
    dy: Tensor, z: Tensor, activation: str | None, negative_slope: float, zero: float = 0.0
) -> Tensor:
    """Return dz = dy * derivative(z), differentiable; a z up to ``zero`` counts as 0.

    For ReLU and leaky ReLU ``z`` may be the output instead, which has the same sign.
    """
    if activation is None:
        return dy
    if activation == "relu":
        return torch.where(z <= zero, 0.0, dy)
    if activation == "leaky_relu":
        return torch.where(z > zero, dy, dy * negative_slope)
    if activation == "silu":
        sigmoid = torch.sigmoid(z)
        return dy * (sigmoid + sigmoid * (z - z * sigmoid))
    raise epilogue.unknown_activation(activation)
