"""The CUDA kernels with a residual and an activation, on emulated threads."""

import pytest
import torch
import torch.nn.functional as F
from support.cases import (
    DTYPES,
    layouts,
    make_input,
    per_channel,
    reduced_dims,
    reference_moments,
    sum_tolerance,
    to_layout,
)
from support.emulated import MULTIPROCESSORS, ORDERS, Device, placed, statistics, totals_of
from support.fusing import (
    ACTIVATIONS,
    FUSED,
    NAMES,
    SLOPE,
    assert_error_at_most_twice,
    make_operands,
    run_separately,
)

from syncbn.ops.epilogue import NUMBERS

EPS = 1e-5

# A shape for each kernel, in two layouts.
SHAPES = [
    (40, 300),
    (1001, 34),  # 4-byte vectors of channels
    (700, 31),
    (70, 24, 7, 7),  # planes as columns
    (21, 2, 28, 28),  # planes of whole vectors
    (5, 3, 31, 37),  # unaligned planes
    (900, 3, 3),  # planes shorter than a vector
]
fused = pytest.mark.parametrize(("activation", "with_residual"), FUSED)
CASES = [(shape, layout) for shape in SHAPES for layout in layouts(shape)]


def run_kernels(device, operands, activation):
    """The output, the gradients, and the constants of the backward pass."""
    x, dy, weight, bias, residual = operands
    number, channels = NUMBERS[activation], x.size(1)
    constants = None if activation is None else statistics(2 * channels)
    totals = device.batch_norm_stats(x)
    output, mean, invstd, count = device.batch_norm_apply(
        x,
        totals,
        weight,
        bias,
        *(None,) * 3,
        0.1,
        EPS,
        None,
        None,
        residual,
        number,
        SLOPE,
        constants,
    )
    parameters = (weight.dtype, bias.dtype)
    epilogue = (constants, number, SLOPE)
    if residual is None or activation is None:
        sums, *gradients = device.batch_norm_backward_reduce(
            dy, x, mean, invstd, *parameters, None, *epilogue
        )
        dz = dy
    else:
        sources = (
            (*epilogue, residual, None)
            if activation == "silu"
            else (None, *epilogue[1:], None, output)
        )
        sums, *gradients, dz = device.batch_norm_backward_reduce_dz(
            dy, x, mean, invstd, *parameters, None, *sources
        )
        epilogue = ()
    grad_input = device.batch_norm_backward_apply(
        dz, x, mean, invstd, weight, sums, count, None, None, *epilogue
    )
    return [output, grad_input, *gradients, *([] if residual is None else [dz])]


def placed_at(operands, offsets):
    """The tensors of the input's shape, `offset` values past an aligned address."""
    x, dy, residual = offsets
    return operands._replace(
        x=placed(operands.x, x),
        dy=placed(operands.dy, dy),
        residual=None if operands.residual is None else placed(operands.residual, residual),
    )


def sum_bounds(operands, activation):
    """Bounds of the sums' errors: kernels add up in float32, as torch's do on CUDA."""
    x, dy, weight, bias, residual = operands.as_leaves(torch.float64)
    mean, var = reference_moments(x.detach())
    xhat = (x.detach() - per_channel(mean, x)) * per_channel((var + EPS).rsqrt(), x)
    z = xhat * per_channel(weight, x) + per_channel(bias, x)
    z = z.detach() if residual is None else (z + residual).detach()
    ACTIVATIONS[activation](z.requires_grad_()).backward(dy)
    dtype = operands.x.dtype
    return {
        "grad_weight": sum_tolerance(dtype, z.grad * xhat),
        "grad_bias": sum_tolerance(dtype, z.grad),
    }


def check(library, operands, activation):
    exact = run_separately(operands.as_leaves(torch.float64), activation)
    theirs = run_separately(operands.as_leaves(), activation)
    bounds = sum_bounds(operands, activation)
    plans = []
    for multiprocessors in MULTIPROCESSORS:
        device = Device(library, multiprocessors, "shuffled")
        plan = device.plan(operands.x, operands.dy)
        if plan not in plans:  # a small tensor is split the same way on every device
            plans.append(plan)
            results = run_kernels(device, operands, activation)
            # A gradient has eight: of z, the sigmoid (3), the derivative (3), the product.
            assert_error_at_most_twice(results, theirs, exact, bounds, roundings=8)


@fused
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_error_is_at_most_twice_that_of_separate_modules(
    library, shape, layout, dtype, activation, with_residual
):
    operands = make_operands(shape, layout, dtype, with_residual=with_residual)
    check(library, placed_at(operands, (0, 0, 0)), activation)


@fused
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("offsets", [(1, 1, 1), (2, 2, 2), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("shape", [(700, 24), (9, 3, 28, 28), (2, 5, 31, 37)], ids=str)
def test_any_alignment(library, shape, offsets, dtype, activation, with_residual):
    operands = make_operands(shape, "contiguous", dtype, with_residual=with_residual)
    check(library, placed_at(operands, offsets), activation)


@fused
@pytest.mark.parametrize("shape", [(300, 40), (70, 24, 7, 7), (2, 5, 31, 37)], ids=str)
def test_same_bits_in_each_order(library, shape, activation, with_residual):
    operands = make_operands(shape, "contiguous", torch.bfloat16, with_residual=with_residual)
    first, *others = [run_kernels(Device(library, 8, o), operands, activation) for o in ORDERS]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "layout"), [((8, 5, 31, 33), "contiguous"), ((999, 6), "contiguous")]
)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_backward_sees_the_sign_that_forward_saw(library, shape, layout, dtype, activation):
    """The gradient is zero exactly where the output is zero, also for z next to zero."""
    operands = make_operands(shape, layout, dtype, with_residual=False)
    # Many normalized values are tiny, of either sign: half of the smallest number of the 16-bit
    # types, which they round to zero.
    operands.x[::2] *= 1e-3
    tiny = {torch.float16: 2e-8, torch.bfloat16: 5e-41}.get(dtype, 1e-9)
    operands.weight.fill_(tiny)
    operands.bias.zero_()
    operands = operands._replace(dy=torch.ones_like(operands.x))
    output, _, _, grad_bias = run_kernels(Device(library, 8, "shuffled"), operands, activation)
    is_positive = (output > 0).double()
    below = SLOPE if activation == "leaky_relu" else 0.0
    gradients = torch.where(output > 0, 1.0, below).double()
    # The gradient of the bias is the number of values with a gradient of one.
    assert torch.equal(grad_bias.double(), gradients.sum(reduced_dims(output)))
    assert 0.05 < is_positive.mean() < 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64, 5), (2, 5, 40)], ids=["matrix", "planar"])
def test_constants_are_those_of_the_normalization(library, shape, dtype):
    x = make_input(shape, "contiguous", dtype, mean=1000.0)  # float32 does not hold it
    weight, bias = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    constants = statistics(10)
    device = Device(library, 8, "forward")
    _, mean, invstd, _ = device.batch_norm_apply(
        *(x, totals_of(x), weight, bias, *(None,) * 3, 0.1, EPS, None, None),
        *(None, NUMBERS["relu"], 0.0, constants),
    )
    scale, shift = constants.view(2, 5)
    assert torch.equal(scale, invstd * weight.double())
    expected = bias.double() + (mean.to(dtype) - mean) * scale
    torch.testing.assert_close(shift, expected, rtol=1e-15, atol=1e-15)  # float64's roundings
    assert dtype == torch.float64 or not torch.equal(shift, bias.double())


@fused
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 4)], ids=str)
def test_empty_batch(library, shape, activation, with_residual):
    """Sums are zero; the constants are not read, and the count is the other ranks'."""
    operands = make_operands(shape, "contiguous", torch.float32, with_residual=with_residual)
    results = run_kernels(Device(library, 8, "shuffled"), operands, activation)
    for name, result in zip(NAMES, results, strict=False):
        if name in ("grad_weight", "grad_bias"):
            assert torch.equal(result, torch.zeros_like(result))
        else:
            assert result.shape == shape


SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45, 200.0, -200.0]


@pytest.mark.parametrize("slope", [0.0, 0.5])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("channels", [3, 8])
def test_special_values_as_torch_treats_them(library, channels, activation, slope):
    """NaN in the residual, after a normalization to zero; and in the gradient."""
    device = Device(library, 8, "forward")
    functions = {"relu": F.relu, "leaky_relu": lambda z: F.leaky_relu(z, slope), "silu": F.silu}
    for dz in (1.0, float("inf"), float("nan")):
        z = torch.tensor(SPECIAL).repeat_interleave(channels).view(-1, channels).requires_grad_()
        expected = functions[activation](z)
        expected.backward(torch.full_like(z, dz))
        zeros, ones = torch.zeros_like(z), torch.ones(channels).double()
        constants = statistics(2 * channels)
        number = NUMBERS[activation]
        totals = torch.cat([0 * ones, 0 * ones, ones[:1] * len(SPECIAL)])
        residual = z.detach().clone()
        output, mean, invstd, _ = device.batch_norm_apply(
            zeros, totals, *(None,) * 5, 0.1, 1.0, None, None, residual, number, slope, constants
        )
        # The roundings of two approximations; SiLU of 1e-45 is half of it: no number.
        torch.testing.assert_close(output, expected.detach(), equal_nan=True, rtol=1e-6, atol=1e-44)
        sources = (constants, residual, None) if activation == "silu" else (None, None, output)
        *_, grad_residual = device.batch_norm_backward_reduce_dz(
            torch.full_like(zeros, dz),
            zeros,
            mean,
            invstd,
            torch.float64,
            torch.float64,
            None,
            sources[0],
            number,
            slope,
            *sources[1:],
        )
        torch.testing.assert_close(grad_residual, z.grad, equal_nan=True, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_silu_over_all_magnitudes(library, dtype):
    largest = 700.0 if dtype == torch.float64 else 80.0
    z = torch.cat([torch.linspace(-largest, largest, 20001), torch.logspace(-30, 2, 999)])
    z = torch.cat([z, -z]).to(dtype)
    z = placed(z[: z.numel() // 8 * 8].view(-1, 8), 0)
    zeros, ones = torch.zeros_like(z), torch.ones(8).double()
    totals = torch.cat([0 * ones, 0 * ones, ones[:1] * len(z)])
    output, *_ = Device(library, 8, "forward").batch_norm_apply(
        zeros, totals, *(None,) * 5, 0.1, 1.0, None, None, z, NUMBERS["silu"], 0.0, None
    )
    # Seven roundings: of exp's reduced argument, its power, the sum, the quotient (two), the
    # product.
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    torch.testing.assert_close(output.double(), F.silu(z.double()), rtol=3.5 * eps, atol=200 * tiny)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_counts_once(library, dtype):
    """Sums of small integers are exact in any order if each value is added once."""
    device = Device(library, 8, "shuffled")
    generator = torch.Generator().manual_seed(0)
    for shape, layout in CASES:
        channels = shape[1]
        dy, x, output = torch.randint(0, 4, (3, *shape), generator=generator).to(dtype)
        tensors = [placed(to_layout(t, layout), 0) for t in (dy, x, output - 1)]
        zeros, ones = torch.zeros(channels).double(), torch.ones(channels).double()
        sums, _, _, dz = device.batch_norm_backward_reduce_dz(
            *tensors[:2],
            zeros,
            ones,
            torch.float64,
            torch.float64,
            None,
            None,
            NUMBERS["relu"],
            0.0,
            None,
            tensors[2],
        )
        expected = torch.where(tensors[2] > 0, tensors[0], 0.0)
        assert torch.equal(dz, expected) and dz.stride() == tensors[0].stride()
        dims = reduced_dims(dy)
        assert torch.equal(
            sums,
            torch.cat(
                [expected.double().sum(dims), (expected.double() * tensors[1].double()).sum(dims)]
            ),
        )
