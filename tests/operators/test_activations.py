"""The operators with a residual and an activation: values, contracts and damaged arguments."""

import pytest
import torch
import torch.nn.functional as F
from support import ops
from support.cases import make_input, per_channel

from syncbn.ops import epilogue, fallback, formulas

pytestmark = pytest.mark.any_torch

NONE, RELU, LEAKY_RELU, SILU = range(4)


def apply(x, residual=None, activation=NONE, slope=0.0, constants=None):
    totals = ops.batch_norm_stats(x)
    return ops.batch_norm_apply(
        x, totals, *(None,) * 5, 0.1, 0.0, None, None, residual, activation, slope, constants
    )


@pytest.mark.parametrize("name", ["gelu", "", "SiLU", 3])
def test_unknown_activation(name):
    z = torch.ones(2)
    for compute in (
        lambda: formulas.activation(z, name, 0.0, 0.0),
        lambda: formulas.activation_gradient(z, z, name, 0.0),
        lambda: epilogue.activate(z, name, 0.0),
    ):
        with pytest.raises(ValueError, match=f"but got '?{name}"):
            compute()


@pytest.mark.parametrize("number", [-1, 4])
def test_unknown_number_of_an_activation(number):
    x = torch.rand(4, 3)
    totals, nothing = ops.batch_norm_stats(x), (None,) * 5
    with pytest.raises(ValueError, match=f"expected activation to be 0 to 3, but got {number}"):
        fallback.batch_norm_apply(x, totals, *nothing, 0.1, 0.0, None, None, None, number)
    errors = (RuntimeError, ValueError)  # the second of torch's expressions
    with pytest.raises(errors, match=f"expected activation to be 0 to 3, but got {number}"):
        apply(x, activation=number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_silu_over_all_magnitudes(dtype, layout):
    """Against float64, or float64 against itself, from underflow to the largest number."""
    largest = 700.0 if dtype == torch.float64 else 80.0
    z = torch.cat([torch.linspace(-largest, largest, 20001), torch.logspace(-30, 2, 999)])
    z = torch.cat([z, -z, torch.tensor([0.0, -0.0])]).to(dtype)
    z = z[: z.numel() // 12 * 12].view(-1, 3, 2, 2)
    z = z.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else z
    # An empty group: the normalization is known, mean and variance are zero.
    zeros = torch.zeros_like(z)
    output, *_ = ops.batch_norm_apply(
        zeros, ops.batch_norm_stats(zeros), *(None,) * 5, 0.1, 1.0, None, None, z, SILU, 0.0, None
    )
    expected = F.silu(z.double())
    # Seven roundings: of exp's reduced argument, its series, the sum, the quotient, the product.
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    torch.testing.assert_close(output.double(), expected, rtol=3.5 * eps, atol=200 * tiny)


@pytest.mark.parametrize("activation", [RELU, LEAKY_RELU, SILU])
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_special_values_as_torch_treats_them(activation, slope):
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45, 200.0, -200.0]
    z = torch.tensor(values * 4).view(4, 3, 3)
    zeros = torch.zeros_like(z)
    normalization = (zeros, ops.batch_norm_stats(zeros), *[None] * 5, 0.1, 1.0, None, None)
    output, *_ = ops.batch_norm_apply(*normalization, z, activation, slope, None)
    expected = [None, F.relu(z), F.leaky_relu(z, slope), F.silu(z)][activation]
    torch.testing.assert_close(output, expected, equal_nan=True, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("with_weight", [True, False])
def test_constants_are_those_of_the_normalization(with_weight):
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    weight = torch.rand(3) if with_weight else None
    constants = torch.empty(6, dtype=torch.float64)
    normalization = (x, ops.batch_norm_stats(x), weight, *[None] * 4, 0.1, 1e-5, None, None)
    _, mean, invstd, _ = ops.batch_norm_apply(*normalization, None, RELU, 0.0, constants)
    scale, shift = constants.view(2, 3)
    assert torch.equal(scale, invstd * (1.0 if weight is None else weight.double()))
    torch.testing.assert_close(shift, (mean.float() - mean) * scale)  # float64


def reduce_arguments(x, activation):
    constants = torch.empty(2 * x.size(1), dtype=torch.float64)
    output, mean, invstd, count = apply(x, None, activation, 0.1, constants)
    operands = (x.clone(), x, mean, invstd, torch.float64, torch.float64, None)
    return operands, constants, output, count


@pytest.mark.parametrize("activation", [RELU, LEAKY_RELU, SILU])
def test_operators_pass_opcheck(activation):
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    operands, constants, output, count = reduce_arguments(x, activation)
    dy, _, mean, invstd, *_ = operands
    fused = (constants, activation, 0.1)
    totals = ops.batch_norm_stats(x)
    operators = torch.ops.syncbn
    torch.library.opcheck(
        operators.batch_norm_apply.default,
        (x, totals, *(None,) * 5, 0.1, 1e-5, None, None, x.clone(), activation, 0.1, constants),
    )
    torch.library.opcheck(operators.batch_norm_backward_reduce.default, (*operands, *fused))
    torch.library.opcheck(
        operators.batch_norm_backward_apply.default,
        (dy, x, mean, invstd, None, totals[:-1].clone(), count, None, None, *fused),
    )
    sources = (constants, activation, 0.1, x.clone(), None)
    if activation != SILU:
        sources = (None, activation, 0.1, None, output)
    torch.library.opcheck(operators.batch_norm_backward_reduce_dz.default, (*operands, *sources))


def test_arguments_that_do_not_fit():
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    operands, constants, output, _ = reduce_arguments(x, RELU)
    with pytest.raises(RuntimeError, match="activation to be 0 to 3, but got 4"):
        apply(x, None, 4)
    with pytest.raises(RuntimeError, match="negative_slope to be finite and not negative"):
        apply(x, None, LEAKY_RELU, -1.0)
    with pytest.raises(ValueError, match=r"residual to have shape \[4, 3, 5\]"):
        apply(x, x[:2])
    with pytest.raises(TypeError, match="residual to have dtype float32, .* but got float64"):
        apply(x, x.double())
    with pytest.raises(RuntimeError, match="residual to be contiguous or channels-last"):
        apply(x, torch.rand(3, 4, 5).transpose(0, 1))
    with pytest.raises(ValueError, match=r"constants to have shape \[6\]"):
        apply(x, None, RELU, 0.0, constants[:3])
    with pytest.raises(RuntimeError, match="constants if there is an activation, and only then"):
        ops.batch_norm_backward_reduce(*operands, None, RELU, 0.0)
    with pytest.raises(RuntimeError, match="constants if there is an activation, and only then"):
        ops.batch_norm_backward_reduce(*operands, constants, NONE, 0.0)
    residual = ops.batch_norm_backward_reduce_dz
    with pytest.raises(RuntimeError, match="expected an activation"):
        residual(*operands, None, NONE, 0.0, None, output)
    for sources in [(constants, SILU, 0.0, None, output), (None, RELU, 0.0, x, None)]:
        with pytest.raises(
            RuntimeError, match="expected output for ReLU and leaky ReLU, constants"
        ):
            residual(*operands, *sources)
    with pytest.raises(ValueError, match=r"output to have shape \[4, 3, 5\]"):
        residual(*operands, None, RELU, 0.0, None, output[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_stored_gradient_of_silu(dtype, layout, with_residual):
    x = make_input((4, 67, 5, 7), layout, dtype)
    residual = make_input((4, 67, 5, 7), layout, dtype, seed=1) if with_residual else None
    operands, constants, _, _ = reduce_arguments(x, SILU)
    fused = (constants, SILU, 0.0)
    sums, grad_weight, grad_bias, dz = ops.batch_norm_backward_reduce_dz(
        *operands, *fused, residual, None
    )
    dy, _, mean, invstd, *_ = operands
    xhat = (x.double() - per_channel(mean, x)) * per_channel(invstd, x)
    z = (xhat if residual is None else xhat + residual.double()).requires_grad_()
    F.silu(z).backward(dy.double())
    # One rounding to the dtype and a dozen to the type of the computation, of values up to four.
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    atol = 50 * eps
    torch.testing.assert_close(dz.double(), z.grad, rtol=torch.finfo(dtype).eps, atol=atol)
    # Sums of the unrounded dz: 140 values, each times an xhat up to four, with seven additions of
    # values up to four before each compensated one.
    atol = 140 * 4 * (50 + 7) * eps
    expected = [z.grad.sum((0, 2, 3)), (z.grad * xhat).sum((0, 2, 3))]
    torch.testing.assert_close(sums, torch.cat(expected), rtol=0, atol=atol)
    torch.testing.assert_close([grad_bias, grad_weight], expected, rtol=0, atol=atol)
