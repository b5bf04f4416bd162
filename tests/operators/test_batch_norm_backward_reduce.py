import pytest
import torch
from support import ops
from support.cases import (
    DTYPES,
    EMPTY_SHAPES,
    all_cases,
    make_input,
    per_channel,
    reduced_dims,
    reference_moments,
    sum_tolerance,
)

pytestmark = [pytest.mark.any_torch, pytest.mark.usefixtures("each_device")]


@pytest.mark.parametrize(("shape", "layout", "dtype"), all_cases())
def test_sums_match_float64(shape, layout, dtype):
    x = make_input(shape, layout, dtype)
    dy = make_input(shape, layout, dtype, mean=0.1, seed=1)
    mean, var = reference_moments(x)
    invstd = (var + 1e-5).rsqrt()
    sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(dy, x, mean, invstd)

    xhat = (x.double() - per_channel(mean, x)) * per_channel(invstd, x)
    products = dy.double() * xhat
    error = (sums[: shape[1]] - dy.double().sum(reduced_dims(x))).abs()
    assert (error <= sum_tolerance(dtype, dy.double())).all()
    error = (sums[shape[1] :] - products.sum(reduced_dims(x))).abs()
    assert (error <= sum_tolerance(dtype, products)).all()
    assert sums.dtype == grad_weight.dtype == grad_bias.dtype == torch.float64
    assert torch.equal(torch.cat([grad_bias, grad_weight]), sums)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_mean_does_not_cost_the_sums(layout):
    x = make_input((16, 5, 24, 24), layout, torch.float32, mean=1e3, std=1.0)
    dy = make_input(x.shape, layout, torch.float32, mean=1.0, seed=1)
    mean, var = reference_moments(x)
    invstd = (var + 1e-5).rsqrt()
    _, grad_weight, _ = ops.batch_norm_backward_reduce(dy, x, mean, invstd)
    products = dy.double() * (x.double() - per_channel(mean, x)) * per_channel(invstd, x)
    # A mean rounded to float32 would cost up to 3e-5 of the sum of dy, here about 0.1.
    error = (grad_weight - products.sum(reduced_dims(x))).abs()
    assert (error <= sum_tolerance(torch.float32, products)).all()


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_gradients_come_in_the_dtypes_of_weight_and_bias(weight_dtype, bias_dtype):
    x = make_input((4, 3, 5), "contiguous", torch.bfloat16)
    mean, var = reference_moments(x)
    dtypes = (weight_dtype, bias_dtype)
    sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(x, x, mean, var, *dtypes)
    assert (grad_weight.dtype, grad_bias.dtype) == dtypes
    assert torch.equal(grad_bias, sums[:3].to(bias_dtype))
    assert torch.equal(grad_weight, sums[3:].to(weight_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty_input_sends_zeros(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    mean, invstd = torch.zeros(3).double(), torch.ones(3).double()
    for result in ops.batch_norm_backward_reduce(x, x, mean, invstd):
        assert not result.any()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_bad_value_stays_in_its_channel(layout):
    x = make_input((3, 5, 7, 7), layout, torch.float32)
    dy = make_input((3, 5, 7, 7), layout, torch.float32, seed=1)
    dy[1, 2, 3, 4] = torch.nan
    mean, var = reference_moments(x)
    sums, *_ = ops.batch_norm_backward_reduce(dy, x, mean, var)
    assert torch.isnan(sums).nonzero().flatten().tolist() == [2, 5 + 2]
