"""Our error is at most twice that of torch's BatchNorm in the same dtype, against float64.

Both are measured on the whole batch. Twice, because either error is a maximum over a sample of
roundings; a systematic error (a too narrow accumulator) is 5 to 100 times as large.
"""

import pytest
import torch
from support import hidden
from support.cases import make_input, make_vector
from torch import nn

from syncbn import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("each_device")

QUANTITIES = ["output", "grad_input", "grad_weight", "grad_bias", "running_mean", "running_var"]


def train(kind, x, dy, weight, bias, parameter_dtype):
    layer = (SyncBatchNorm if kind == "ours" else nn.BatchNorm2d)(x.size(1))
    layer = layer.to(torch.float64 if kind == "exact" else parameter_dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    x = (x.double() if kind == "exact" else x.clone()).requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    results = (y, x.grad, layer.weight.grad, layer.bias.grad, *list(layer.buffers())[:2])
    return [t.detach().double() for t in results]


@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(4, 16, 5, 7), (8, 130, 14, 14), (3, 70, 33, 33)])
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_error_is_at_most_twice_torchs(dtype, parameter_dtype, shape, layout, mean):
    x = make_input(shape, layout, dtype, mean=mean, std=1.0)
    dy = make_input(shape, layout, dtype, mean=0.0, std=1.0, seed=1)
    weight = make_vector(shape[1], parameter_dtype, seed=2)
    bias = make_vector(shape[1], parameter_dtype, seed=3)
    exact, torchs, ours = (
        train(kind, x, dy, weight, bias, parameter_dtype) for kind in ("exact", "torch", "ours")
    )
    for name, right, theirs, mine in zip(QUANTITIES, exact, torchs, ours, strict=True):
        error, torchs_error = (mine - right).abs().max(), (theirs - right).abs().max()
        # One rounding is allowed even where torch happens to be exact.
        eps = torch.finfo(mine.dtype if name in QUANTITIES[:2] else parameter_dtype).eps
        allowed = max(2 * torchs_error.item(), eps * right.abs().max().item() / 2)
        if name == "running_mean" and (x.is_cuda or hidden.is_asked_for()):
            # CUDA's threads add up in float32, and the fallback rounds the deviations to it: a mean
            # near zero is as exact as the values are.
            allowed = max(allowed, 0.1 * eps * x.double().std().item())
        assert error <= allowed, f"{name}: {error:.2e} against torch's {torchs_error:.2e}"


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(4, 16, 5, 7), (8, 30, 14, 14)])
def test_error_in_float64_is_at_most_that_of_four_operations(shape, layout):
    """Against 80-bit arithmetic, by NumPy.

    The bound is not torch's error, which is up to five times as large on CPUs, and smaller on GPUs.
    """
    import numpy as np

    x = make_input(shape, layout, torch.float64, std=1.0)
    wide = np.asarray(x.cpu().numpy(), dtype=np.longdouble)
    assert np.finfo(wide.dtype).eps < 1e-18, "this platform has no wider type"
    mean = wide.mean((0, 2, 3), keepdims=True)
    var = ((wide - mean) ** 2).mean((0, 2, 3), keepdims=True)
    exact = (wide - mean) / np.sqrt(var + np.longdouble(1e-5))
    ours = SyncBatchNorm(shape[1]).double()(x).detach().cpu().numpy()
    # Half an eps each.
    assert np.abs(ours - exact).max() <= 2 * np.finfo(ours.dtype).eps * abs(exact).max()


@pytest.mark.parametrize("mean", [0.0, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(1, 5, 31), (4, 7, 33), (256, 64), (3, 1000), (8, 30, 14, 14)])
def test_variance_in_float64_is_as_good_as_its_message(shape, layout, mean):
    """Against 80-bit arithmetic, by NumPy: a few roundings of the mean square."""
    import numpy as np

    x = make_input(shape, layout, torch.float64, mean=mean, std=1.0)
    layer = SyncBatchNorm(shape[1], momentum=1.0).double()
    layer(x)
    wide = np.asarray(x.cpu().numpy(), dtype=np.longdouble)
    axes = tuple(axis for axis in range(x.dim()) if axis != 1)
    exact = wide.var(axes, ddof=1)
    error = np.abs(layer.running_var.cpu().numpy() - exact) / exact
    mean_square_in_variances = 1 + wide.mean(axes) ** 2 / wide.var(axes)
    # Half an eps for each: the message, reading it, the product with n / (n - 1), and five for the
    # sum of squares, whose terms are up to twice those around the mean.
    assert (error <= 8 * np.finfo(np.float64).eps / 2 * mean_square_in_variances).all()
