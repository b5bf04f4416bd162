import pytest
import torch
from support import ops
from support.cases import (
    DTYPES,
    EMPTY_SHAPES,
    all_cases,
    assert_normalized_close,
    make_input,
    make_vector,
    per_channel,
    reference_moments,
)

pytestmark = [pytest.mark.any_torch, pytest.mark.usefixtures("each_device")]


def reference(dy, x, mean, invstd, weight, sums, count):
    xhat = (x.double() - per_channel(mean, x)) * per_channel(invstd, x)
    mean_dy, mean_dy_xhat = (per_channel(s, x) for s in (sums / count).chunk(2))
    return (dy.double() - mean_dy - xhat * mean_dy_xhat) * per_channel(weight * invstd, x)


@pytest.mark.parametrize(("shape", "layout", "dtype"), all_cases())
def test_grad_input_matches_float64(shape, layout, dtype):
    x = make_input(shape, layout, dtype)
    dy = make_input(shape, layout, dtype, mean=0.1, seed=1)
    mean, var = reference_moments(x)
    invstd = (var + 1e-5).rsqrt()
    channels = shape[1]
    weight = make_vector(channels, torch.float64, seed=2)
    # The formula holds for any sums and count, such as those of a larger group.
    sums = make_vector(2 * channels, torch.float64, seed=3) * 5
    count = torch.tensor([2.0 * x.numel() / channels], dtype=torch.float64)
    operands = (dy, x, mean, invstd, weight, sums, count)
    grad_input = ops.batch_norm_backward_apply(*operands)
    assert grad_input.dtype == dtype and grad_input.stride() == x.stride()
    assert_normalized_close(grad_input, reference(*operands), dtype)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_mean_does_not_cost_the_gradient(layout):
    x = make_input((16, 5, 24, 24), layout, torch.float32, mean=1e3, std=1.0)
    dy = make_input(x.shape, layout, torch.float32, seed=1)
    mean, var = reference_moments(x)
    weight, sums, count = (torch.ones(size).double() for size in (5, 10, 1))
    operands = (dy, x, mean, (var + 1e-5).rsqrt(), weight, sums, count)
    grad_input = ops.batch_norm_backward_apply(*operands)
    # A mean rounded to float32 would cost 3e-5 here.
    torch.testing.assert_close(grad_input.double(), reference(*operands), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty_input(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    zeros, ones = torch.zeros(3).double(), torch.ones(3).double()
    sums, count = torch.zeros(6).double(), torch.zeros(1).double()
    grad = ops.batch_norm_backward_apply(x, x, zeros, ones, None, sums, count)
    assert grad.shape == x.shape and grad.dtype == dtype
