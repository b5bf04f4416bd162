"""Inputs of the tests: shapes, dtypes, layouts; and the tolerances, with reasons."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support import ops

# Operators, and those that differ with a residual and an activation.
OPS = ["batch_norm_stats", "batch_norm_apply", "batch_norm_backward_reduce"]
OPS += ["batch_norm_backward_apply", "batch_norm_backward_reduce_dz"]
OPS += ["batch_norm_forward", "batch_norm_backward"]
OPS += ["batch_norm_forward fused", "batch_norm_backward fused"]
OPS += ["batch_norm_apply fused", "batch_norm_backward_reduce fused"]
OPS += ["batch_norm_backward_apply fused", "batch_norm_backward_reduce_dz of SiLU"]
RELU, SILU = 1, 3
# Those that take a mask, only on CPUs.
MASKED_OPS = [f"{name} masked" for name in OPS if len(name.split()) == 1]
OPS += ["verify_sums"]
# Those of compiled graphs, which are written in Python over the others.
COMPILED_OPS = ["compiled_forward", "compiled_backward"]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

SHAPES = [
    (2, 1),  # the smallest batch there is
    (7, 3),  # 2-D, less than a vector
    (129, 65),  # 2-D, chunks and vectors with a rest
    (5, 2049),  # more channels than a block of work, and one over
    (8, 3, 7),  # 3-D
    (2, 3, 5, 7),  # primes
    (3, 64, 1, 1),  # one pixel
    (4, 1, 9, 11),  # one channel
    (3, 17, 7, 7),  # the small maps of a ResNet's end
    (1, 5, 61, 67),  # one sample, planes over several chunks
    (2, 3, 4, 5, 6),  # 5-D
    (2, 2, 3, 2, 3, 2),  # 6-D
    (3, 2, 131, 257),  # several items of work for each channel
]

# Of each plan of the CUDA kernels: short enough for a CPU to run them.
CUDA_SHAPES = [
    *[shape for shape in SHAPES if math.prod(shape) < 20_000],
    (2, 2, 101, 103),  # unaligned planes, split
    (1, 3),  # one value in each channel
    (1500, 24),  # 16-byte vectors of channels, whole and split
    (3000, 24),  # two full chunks of rows for a thread, on one multiprocessor
    (10000, 31),  # one channel at a time, in more segments than reducing threads load at once
    (1001, 34),  # 4-byte vectors of channels
    (40, 300),  # more vectors of channels than a tile
    (5, 3, 7, 7),
    (21, 2, 28, 28),  # planes of whole vectors
    (900, 3, 3),  # planes shorter than a vector
    (2100, 8, 3),  # planes that together have whole vectors: whole and split
    (70, 24, 7, 7),
    (70, 18, 2, 2),  # fewer of them in the last tile, in 16 bits
    (2, 1025, 2),  # many channels of few values
    (20, 1, 1033),  # one channel, split
]
# Where an offset changes the kernel.
UNALIGNED_SHAPES = [(13, 5), (700, 24), (5, 3, 7, 7), (9, 3, 28, 28), (2, 5, 31, 37)]

EMPTY_SHAPES = [(0, 3), (0, 3, 4, 4), (2, 3, 0), (2, 3, 0, 5)]


def layouts(shape: tuple[int, ...]) -> list[str]:
    return ["contiguous"] if len(shape) == 2 else ["contiguous", "channels_last"]


def all_cases(shapes: list[tuple[int, ...]] = SHAPES) -> list[object]:
    return [
        pytest.param(shape, layout, dtype, id=f"{shape}-{layout}-{str(dtype)[6:]}")
        for shape in shapes
        for layout in layouts(shape)
        for dtype in DTYPES
    ]


def make_input(
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    *,
    mean: float = 1.0,
    std: float = 2.0,
    seed: int = 0,
) -> Tensor:
    """Return the same values on every default device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator) * std + mean
    return to_layout(x.to(dtype).to(torch.get_default_device()), layout)


def operator(name: str) -> Any:
    return getattr(torch.ops.syncbn, name.split()[0]).default


def arguments(name: str, x: Tensor, parameter_dtype: torch.dtype = torch.float32) -> tuple:
    """Return valid arguments of an operator for an input."""
    channels = x.size(1)
    totals = ops.batch_norm_stats(x.detach())
    mean, var = reference_moments(x.detach())
    vector = torch.ones(channels, dtype=parameter_dtype, device=x.device)
    running = (vector.clone(), vector.clone(), torch.tensor(0, device=x.device))
    dtypes = (parameter_dtype, torch.float64)
    sums = torch.ones(2 * channels, dtype=torch.float64, device=x.device)
    constants, other = torch.cat([var, mean]), x.clone()
    mask = make_mask(x)
    apply = (x, totals, vector, vector.clone(), *running, None, 1e-5)
    reduce = (x.clone(), x, mean, var, *dtypes)
    backward_apply = (x.clone(), x, mean, var, vector, sums, totals[-1:].clone())
    forward = (x, vector, vector.clone(), *running, None, 1e-5)
    backward = (x.clone(), x, mean, var, vector, totals[-1:].clone(), *dtypes)
    return {
        "batch_norm_stats": (x,),
        "batch_norm_apply": apply,
        "batch_norm_apply fused": (*apply, None, None, other, SILU, 0.0, constants),
        "batch_norm_backward_reduce": reduce,
        "batch_norm_backward_reduce fused": (*reduce, None, constants, RELU, 0.0),
        "batch_norm_backward_reduce_dz": (
            *(*reduce, None),
            *(None, RELU, 0.0, None, other),
        ),
        "batch_norm_backward_reduce_dz of SiLU": (
            *(*reduce, None),
            *(constants, SILU, 0.0, other, None),
        ),
        "batch_norm_backward_apply": backward_apply,
        "batch_norm_backward_apply fused": (*backward_apply, None, None, constants, SILU, 0.0),
        "batch_norm_forward": forward,
        "batch_norm_forward fused": (*forward, other, SILU, 0.0, constants),
        "batch_norm_backward": backward,
        "batch_norm_backward fused": (*backward, constants, RELU, 0.0),
        "batch_norm_stats masked": (x, None, *[None] * 5, 0.0, None, mask),
        "batch_norm_apply masked": (*apply, None, None, other, SILU, 0.0, constants, mask),
        "batch_norm_backward_reduce masked": (*reduce, None, constants, SILU, 0.0, mask),
        "batch_norm_backward_reduce_dz masked": (
            *(*reduce, None),
            *(constants, SILU, 0.0, other, None, mask),
        ),
        "batch_norm_backward_apply masked": (*backward_apply, None, None, None, 0, 0.0, mask),
        "batch_norm_forward masked": (*forward, None, 0, 0.0, None, mask),
        "batch_norm_backward masked": (*backward, None, 0, 0.0, mask),
        "verify_sums": (torch.cat([totals, totals.new_tensor([7.0, 8.0, 64.0])]), 7.0),
        "compiled_forward": (
            *(x, None, None, *running, 0.1, 1e-5, None, None, 0.0, None, None, None),
            *(0, None, None),
        ),
        "compiled_backward": (x.clone(), x, mean, var, *dtypes, None, 0, None, None),
    }[name]


def make_mask(x: Tensor, seed: int = 5) -> Tensor:
    """Return a mask, as operators take it, of about two thirds of the places."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(x.shape[:1] + x.shape[2:], generator=generator, device="cpu")
    return (places < 2 / 3).to(x.device)


def make_vector(channels: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Return a weight or bias."""
    return make_input((channels,), "contiguous", dtype, mean=0.0, std=1.0, seed=seed)


def to_layout(x: Tensor, layout: str) -> Tensor:
    if layout == "contiguous":
        return x.contiguous()
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def reduced_dims(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view((1, -1) + (1,) * (like.dim() - 2))


def reference_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance in float64, by the textbook's two passes."""
    x = x.double()
    mean = x.mean(reduced_dims(x))
    return mean, (x - per_channel(mean, x)).square().mean(reduced_dims(x))


def assert_moments_close(message: Tensor, rows: Tensor) -> None:
    """Compare a message of the statistics with the moments of its values, [count, channels]."""
    n, channels = rows.shape
    assert message.dtype == torch.float64 and message.shape == (2 * channels + 1,)
    assert message[-1] == n
    if n == 0:
        assert not message.any()
        return
    mean = message[:channels] / n
    var = message[channels:-1] / n - mean * mean
    expected_mean, expected_var = reference_moments(rows)
    assert ((mean - expected_mean).abs() <= sum_tolerance(rows.dtype, rows.double()) / n).all()
    # The message's own rounding: float64's eps of the mean square.
    message_error = 4 * torch.finfo(torch.float64).eps * (expected_mean.square() + expected_var)
    squares_error = sum_tolerance(rows.dtype, (rows.double() - expected_mean).square()) / n
    assert ((var - expected_var).abs() <= squares_error + message_error).all()


def assert_normalized_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, message_error: float = 0.0
) -> None:
    """Compare values that were computed in float (double for double) and rounded to ``dtype``.

    One rounding to dtype is half of its eps, relative. The arithmetic before it is a handful of
    float operations on values of order one: 8 eps of the compute type, of the largest value.
    ``message_error`` is the absolute error from the rounding of the message.
    """
    compute_eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(),
        expected,
        rtol=torch.finfo(dtype).eps,
        atol=8 * compute_eps * scale + message_error,
    )


def sum_tolerance(dtype: torch.dtype, terms: Tensor) -> Tensor:
    """Bound the error of a sum per channel.

    Both implementations stay within 64 roundings of half an eps of the sum of magnitudes: the CPU
    adds 16 terms without a carry and compensates from there on, CUDA adds the chunks of a thread
    and then up to 256 threads pairwise in float32, blocks in float64. That is measured, not proven.
    One rounding of float64 is for sums whose terms are all zero.
    """
    compute_eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return 32 * compute_eps * terms.abs().sum(reduced_dims(terms)) + math.ulp(1.0)
