"""The operators of csrc as torch's own expressions: for devices that csrc has no kernels for.

csrc/ops.cpp holds their contract. The dispatcher takes them where nothing else is registered. The
layer has checked their arguments. Their results never require a gradient.

Values are computed in float32, or in float64 for float64 inputs, by the formulas of
csrc/common/formulas.h. Deviations from a center next to the mean are summed over the batch, so that
a mean far from zero costs no accuracy. Statistics, one for each channel, are float64.

On CUDA devices (also ROCm's) nothing waits for the device. On other devices a pass waits once, to
raise its error at once.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncbn import _compat
from syncbn.ops import _extension, epilogue, formulas, masks, tensors

_NAMES = tuple(epilogue.NUMBERS)

# csrc/common/dtype.h: a positive number up to this is rounded to 0 in the dtype; 0 for others.
_LARGEST_ZERO = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}


@functools.cache
def check_device(device: torch.device) -> None:
    """Warn once that a device has no operators.

    Raises:
        NotImplementedError: It has no float64.
    """
    if tensors.has_operators(device):
        return
    if not _has_float64(device):
        raise NotImplementedError(
            "expected a device with float64, in which statistics are computed, but got "
            f"{str(device)!r}; move the model to a CPU or CUDA device, or train torch's own layers "
            "there: syncbn.revert_sync_batchnorm(model)"
        )
    reason = f" ({_extension.cuda_missing})" if device.type == "cuda" else ""
    warnings.warn(
        f"syncbn has no operators for {device.type!r} tensors in this build{reason}: SyncBatchNorm "
        "trains there by torch's expressions, which takes more time and memory. If that matters, "
        "use a device with operators: `python -m syncbn info` lists them. This warning "
        "comes once for each device",
        stacklevel=2,
    )


def _has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64; some raise, and some compute in float32 instead."""
    # Known, and not tried: while a CUDA graph is captured the host must not wait for the device.
    if device.type in ("cpu", "cuda"):
        return True
    with _compat.without_dispatch_modes():
        try:
            one = torch.ones(1, dtype=torch.float64, device=device)
            return (one + 2.0**-40).item() != 1
        except (RuntimeError, TypeError):
            return False


def _center(mean: Tensor, batch: Tensor) -> Tensor:
    """Return the mean, rounded to the dtype that the batch is computed in, in float64."""
    return mean.to(tensors.compute_dtype(batch)).to(torch.float64)


def _sums(*terms: Tensor) -> list[Tensor]:
    """Return the sums of terms of the batch's shape, for each channel, in float64."""
    dims = [dim for dim in range(terms[0].dim()) if dim != 1]
    return [term.sum(dims, dtype=torch.float64) for term in terms]


def _name_of(activation: int) -> str | None:
    if not 0 <= activation < len(_NAMES):
        raise ValueError(f"expected activation to be 0 to {len(_NAMES) - 1}, but got {activation}")
    return _NAMES[activation]


def _end(like: Tensor, count: float, tail: Tensor | None) -> list[Tensor]:
    """Return the end of a message, by no copy from the host, which would wait for the device."""
    numbers = [count] if tail is None else [count, *tail.tolist()]
    return [like.new_full((1,), number) for number in numbers]


@torch.no_grad()
def batch_norm_stats(
    input: Tensor,
    tail: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute this rank's message."""
    vectors = (weight, bias, running_mean, running_var, num_batches_tracked)
    torch.ops.syncbn.check_arguments.default(input, *vectors, momentum, residual)
    check_device(input.device)
    channels = input.size(1)
    count = input.numel() // channels
    if count == 0:
        sums = squares = input.new_zeros(channels, dtype=torch.float64)
    else:
        x = tensors.cast(input, tensors.compute_dtype(input))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        center = x.mean(dims, keepdim=True)
        deviation = x - center
        sum_of_deviations, m2 = _sums(deviation, deviation.square())
        rest = sum_of_deviations / count
        mean = center.flatten().to(torch.float64) + rest
        m2 = (m2 - sum_of_deviations * rest).clamp(min=0)
        # csrc/common/message.h: the squares are about the mean that will be read from the sums.
        sums = mean * count
        squares = m2 + sums * (sums / count)
    return torch.cat([sums, squares, *_end(sums, count, tail)])


@torch.no_grad()
def verify_sums(
    sums: Tensor, tail_sum: float, other_tail_sum: float | None = None, status: Tensor | None = None
) -> Tensor:
    """Return sums over all ranks without their tail, verified: by the CPU's operator if it can."""
    end = sums[-4:]
    if not sums.is_cuda and status is None:
        torch.ops.syncbn.verify_sums.default(end.cpu(), tail_sum, other_tail_sum)
        return sums[:-3].clone()
    aborted, differ = end[:1].isnan(), end[1:2] != tail_sum
    if other_tail_sum is not None:
        differ = differ & (end[1:2] != other_tail_sum)
    if status is not None:
        # In the order of the stream, in which other passes write the status, too.
        noted = status.to(sums.device, non_blocking=True)
        note = torch.where(aborted, -tail_sum, torch.where(differ, tail_sum, 0.0))
        status.copy_(torch.where(noted == 0, note, noted), non_blocking=True)
    return torch.where(aborted | differ, torch.nan, sums[:-3])


@torch.no_grad()
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
    tail_sum: float | None = None,
    status: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
    constants: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize, and update the running statistics."""
    if tail_sum is not None:
        totals = verify_sums(totals, tail_sum, None, status)
    size = 2 * input.size(1)
    count = totals[size : size + 1].clone()
    mean, invstd, m2 = formulas.statistics(totals[:size], count, eps)
    # By .data: the layer increments the version, as for the operators of csrc.
    running = [
        None if v is None else v.data for v in (running_mean, running_var, num_batches_tracked)
    ]
    formulas.update_running((mean, m2, count), running, momentum)

    center = _center(mean, input)
    scale, shift = formulas.normalize_constants(mean, center, invstd, weight, bias)
    if constants is not None:
        constants.copy_(torch.cat([scale, shift]))
    z = formulas.multiply_add(input, center, scale, shift)
    if residual is not None:
        z = z + residual
    zero = _LARGEST_ZERO.get(input.dtype, 0.0)
    y = formulas.activation(z, _name_of(activation), negative_slope, zero)
    return torch.empty_like(input).copy_(y), mean, invstd, count


def _epilogue_gradient(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    epilogue: tuple[Tensor | None, int, float],
    residual: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Return dz, unrounded: ``grad_output`` through the activation."""
    constants, activation, negative_slope = epilogue
    dy = tensors.cast(grad_output, tensors.compute_dtype(input))
    if activation == 0:
        return dy
    if output is not None:  # which has the sign of z
        z = tensors.cast(output, dy.dtype)
    else:
        assert constants is not None
        z = formulas.multiply_add(input, mean, *constants.chunk(2))
        if residual is not None:
            z = z + residual
    zero = _LARGEST_ZERO.get(input.dtype, 0.0)
    return formulas.activation_gradient(dy, z, _name_of(activation), negative_slope, zero)


@torch.no_grad()
def batch_norm_backward_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype = torch.float64,
    bias_dtype: torch.dtype = torch.float64,
    tail: Tensor | None = None,
    constants: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this rank's sums of dz and dz·xhat, and the gradients of weight and bias."""
    dz = _epilogue_gradient(grad_output, input, mean, (constants, activation, negative_slope))
    return _reduce(dz, input, mean, invstd, (weight_dtype, bias_dtype), tail)


@torch.no_grad()
def batch_norm_backward_reduce_dz(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    tail: Tensor | None,
    constants: Tensor | None,
    activation: int,
    negative_slope: float,
    residual: Tensor | None,
    output: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do as :func:`batch_norm_backward_reduce`, and store dz."""
    epilogue = (constants, activation, negative_slope)
    dz = _epilogue_gradient(grad_output, input, mean, epilogue, residual, output)
    results = _reduce(dz, input, mean, invstd, (weight_dtype, bias_dtype), tail)
    return *results, torch.empty_like(input).copy_(dz)


def _reduce(
    dz: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    tail: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    center = _center(mean, input)
    x = tensors.cast(input, tensors.compute_dtype(input))
    deviation = x - tensors.per_channel(center.to(x.dtype), x)
    sum_dz, sum_products = _sums(dz, dz * deviation)
    # Corrects the rounding of the center.
    sum_dz_xhat = (sum_products - (mean - center) * sum_dz) * invstd
    end = [] if tail is None else _end(sum_dz, 0.0, tail)
    return (
        torch.cat([sum_dz, sum_dz_xhat, *end]),
        sum_dz_xhat.to(dtypes[0], copy=True),
        sum_dz.to(dtypes[1], copy=True),
    )


@torch.no_grad()
def batch_norm_backward_apply(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    count: Tensor,
    tail_sum: float | None = None,
    status: Tensor | None = None,
    constants: Tensor | None = None,
    activation: int = 0,
    negative_slope: float = 0.0,
) -> Tensor:
    """Compute the gradient of the input from the sums of the whole group."""
    if tail_sum is not None:
        sums = verify_sums(sums, tail_sum, None, status)
    center = _center(mean, input)
    slope, shift, scale = formulas.grad_input_constants(
        mean, center, invstd, weight, sums[: 2 * input.size(1)], count
    )
    dz = _epilogue_gradient(grad_output, input, mean, (constants, activation, negative_slope))
    scale = tensors.per_channel(scale.to(dz.dtype), dz)
    grad_input = dz * scale + formulas.multiply_add(input, center, slope, shift)
    return torch.empty_like(input).copy_(grad_input)


@torch.no_grad()
def batch_norm_forward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do as :func:`batch_norm_apply`, by the statistics of the input."""
    vectors = (weight, bias, running_mean, running_var, num_batches_tracked)
    epilogue = (residual, activation, negative_slope, constants)
    totals = batch_norm_stats(input, None, *vectors, momentum, residual)
    formulas.check_input_size(input)
    return batch_norm_apply(input, totals, *vectors, momentum, eps, None, None, *epilogue)


@torch.no_grad()
def batch_norm_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, weight and bias in a single process."""
    epilogue = (constants, activation, negative_slope)
    sums, grad_weight, grad_bias = batch_norm_backward_reduce(
        grad_output, input, mean, invstd, weight_dtype, bias_dtype, None, *epilogue
    )
    grad_input = batch_norm_backward_apply(
        grad_output, input, mean, invstd, weight, sums, count, None, None, *epilogue
    )
    return grad_input, grad_weight, grad_bias


OPERATORS = {
    operator.__name__: operator
    for operator in (
        batch_norm_stats,
        batch_norm_apply,
        batch_norm_backward_reduce,
        batch_norm_backward_reduce_dz,
        batch_norm_backward_apply,
        batch_norm_forward,
        batch_norm_backward,
    )
}


def for_other_devices(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator with a mask, which refuses tensors of devices with operators.

    The dispatcher also comes here with quantized, sparse and nested tensors.
    """
    name, num_operands = operator.__name__, len(inspect.signature(operator).parameters)

    @functools.wraps(operator)
    def call(batch: Tensor, *operands: Any) -> Any:
        if tensors.has_operators(batch.device):
            raise NotImplementedError(
                f"syncbn::{name} takes dense tensors without subclasses on {batch.device.type}, "
                "neither sparse nor nested nor quantized ones"
            )
        # The dispatcher leaves out last operands that are their defaults. A mask is the last one.
        if len(operands) < num_operands:
            return operator(batch, *operands)
        *others, mask = operands
        return masks.call_filled(OPERATORS, name, (batch, *others), mask)

    return call


# Behind every kernel that csrc registers for a device.
_library = torch.library.Library("syncbn", "IMPL", "CompositeExplicitAutograd")
_library.impl("verify_sums", verify_sums)
for _name, _operator in OPERATORS.items():
    _library.impl(_name, for_other_devices(_operator))
