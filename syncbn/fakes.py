"""The operators' fake kernels, which compute shapes: for compilers, and for the meta device.

csrc/ops.cpp holds the operators' contract.
"""

import torch
from torch import Tensor

from syncbn import _extension as _extension  # registers the operators
from syncbn import devices


def _check_devices(input: Tensor, vectors: list[Tensor | None], *statistics: Tensor | None) -> None:
    """Raise RuntimeError where one tensor on the meta device has brought the others along.

    ``statistics`` are float64, and so on the CPU where the input's device has no float64.
    """
    tensors = [(tensor, input.device) for tensor in vectors]
    tensors += [(tensor, devices.of_statistics(input.device)) for tensor in statistics]
    found = {(str(tensor.device), str(place)) for tensor, place in tensors if tensor is not None}
    if any(device != place for device, place in found):
        devices_found = sorted({str(input.device)} | {device for device, _ in found})
        raise RuntimeError(f"syncbn: expected all tensors on one device, but got {devices_found}")


def _new_statistics(input: Tensor, size: int) -> Tensor:
    place = devices.of_statistics(input.device)
    return input.new_empty(size, dtype=torch.float64, device=place)


def _new_gradient(input: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        return _new_statistics(input, input.size(1))
    return input.new_empty(input.size(1), dtype=dtype)


@torch.library.register_fake("syncbn::batch_norm_stats")
def _(
    input: Tensor, tag: float | None = None, outlook: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    _check_devices(input, [mask])
    size = 2 * input.size(1) + (1 if tag is None else 4)
    return _new_statistics(input, size)


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
    tag_sum: float | None = None,
    verdict: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
    constants: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vectors = [weight, bias, running_mean, running_var, num_batches_tracked, residual, mask]
    _check_devices(input, vectors, totals, constants)
    channels = input.size(1)
    return (
        torch.empty_like(input),
        totals.new_empty(channels),
        totals.new_empty(channels),
        totals.new_empty(1),
    )


@torch.library.register_fake("syncbn::batch_norm_backward_reduce")
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    tag: float | None = None,
    outlook: float = 0.0,
    constants: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_devices(input, [grad_output, mask], mean, invstd, constants)
    channels = input.size(1)
    return (
        mean.new_empty(2 * channels + (0 if tag is None else 4)),
        _new_gradient(input, weight_dtype),
        _new_gradient(input, bias_dtype),
    )


@torch.library.register_fake("syncbn::batch_norm_backward_reduce_dz")
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    tag: float | None,
    outlook: float,
    constants: Tensor | None,
    activation: int,
    negative_slope: float,
    residual: Tensor | None,
    output: Tensor | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_devices(input, [grad_output, residual, output, mask], mean, invstd, constants)
    channels = input.size(1)
    return (
        mean.new_empty(2 * channels + (0 if tag is None else 4)),
        _new_gradient(input, weight_dtype),
        _new_gradient(input, bias_dtype),
        torch.empty_like(input),
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
    tag_sum: float | None = None,
    verdict: Tensor | None = None,
    constants: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    _check_devices(input, [grad_output, weight, mask], mean, invstd, sums, count, constants)
    return torch.empty_like(input)


@torch.library.register_fake("syncbn::batch_norm_forward")
def _(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    residual: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
    constants: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vectors = [weight, bias, running_mean, running_var, num_batches_tracked, residual, mask]
    _check_devices(input, vectors, constants)
    mean, invstd = (_new_statistics(input, input.size(1)) for _ in range(2))
    return torch.empty_like(input), mean, invstd, _new_statistics(input, 1)


@torch.library.register_fake("syncbn::batch_norm_backward")
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    count: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    constants: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_devices(input, [grad_output, weight, mask], mean, invstd, count, constants)
    grad_weight, grad_bias = (_new_gradient(input, dtype) for dtype in (weight_dtype, bias_dtype))
    return torch.empty_like(input), grad_weight, grad_bias
