"""Offsets past 2^31 values. Only the last block runs; only the memory that it touches exists."""

import mmap

import pytest
import torch
from support.emulated import Device, Epilogue, EpilogueGradient, Tail, Verifier, channel_vector

# An offset that wraps around reads zeros here, and does not crash.
BEHIND = 2**32
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which mmap has from Python 3.13 on
PLANES = [
    (2, 2**15, 2**8, 2**8),  # the last channel begins 2^16 values before 2^31, and before 2^32
    (1, 2**15 + 1, 2**8, 2**8),
]
MEAN, INVSTD, WEIGHT = 0.5, 2.0, 3.0


def zeros(shape):
    """Return a tensor of zeros that takes no memory until it is written."""
    number = BEHIND + torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, 2 * number, flags=flags)
    return torch.frombuffer(memory, dtype=torch.float16)[BEHIND:].view(shape)


def operand(shape, seed):
    """Return a tensor of zeros with random values in its last channel, and these values."""
    x = zeros(shape)
    values = x[:, -1]
    values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)))
    return x, values.double()


def of_channels(x, *values):
    """Return float64 vectors of C equal values."""
    return [torch.full((x.size(1),), value, dtype=torch.float64) for value in values]


@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_sums(library, shape):
    channels = shape[1]
    (x, values), (dy, grad) = operand(shape, 0), operand(shape, 1)
    mean, invstd, *gradients = of_channels(x, MEAN, INVSTD, 0.0, 0.0)
    vectors = map(channel_vector, gradients)
    message, sums = (torch.zeros(2 * channels + 1, dtype=torch.float64) for _ in range(2))
    device = Device(library, 132, "forward", only_last_block=True)
    device._run("batch_norm_stats", x, x, message, Tail())
    device._run("batch_norm_backward_reduce", x, dy, x, mean, invstd, sums, *vectors, Tail(),
                EpilogueGradient())  # fmt: skip
    found = [message[channels - 1], message[2 * channels - 1], sums[channels - 1],
             sums[2 * channels - 1]]  # fmt: skip
    xhat = (values - MEAN) * INVSTD
    expected = [values.sum(), values.square().sum(), grad.sum(), (grad * xhat).sum()]
    # Sums of 2^16 or 2^17 values of about 1 in float32: some 1e-6 of the sum of magnitudes.
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=0.2)


@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_results(library, shape):
    (x, values), (dy, grad) = operand(shape, 0), operand(shape, 1)
    output, grad_input = zeros(shape), zeros(shape)
    variance = INVSTD**-2
    count = torch.tensor([100.0], dtype=torch.float64)
    totals = torch.cat([*of_channels(x, 100 * MEAN, 100 * (variance + MEAN**2)), count])
    mean, invstd, weights = of_channels(x, MEAN, INVSTD, WEIGHT)
    weight = channel_vector(weights)
    none = channel_vector(None)
    written = [torch.zeros(size, dtype=torch.float64) for size in (x.size(1), x.size(1), 1)]
    sums = torch.cat(of_channels(x, 10.0, 20.0))
    device = Device(library, 132, "forward", only_last_block=True)
    device._run("batch_norm_apply", x, x, totals, weight, none, none, none, None, False, 0.1,
                0.0, output, *written, Verifier(), Epilogue())  # fmt: skip
    device._run("batch_norm_backward_apply", x, dy, x, mean, invstd, weight, sums, count,
                grad_input, Verifier(), EpilogueGradient())  # fmt: skip
    xhat = (values - MEAN) * INVSTD
    # float16's rounding of the results
    torch.testing.assert_close(output[:, -1].double(), WEIGHT * xhat, rtol=1e-3, atol=1e-3)
    expected = WEIGHT * INVSTD * (grad - 10 / 100 - xhat * 20 / 100)
    torch.testing.assert_close(grad_input[:, -1].double(), expected, rtol=1e-3, atol=4e-3)
