"""Operators with a mask, against float64 on the unmasked positions, on CPUs.

Most cases test the binary, which is the same for every torch.
"""

import math

import pytest
import torch
from support import ops
from support.cases import (
    MASKED_OPS,
    all_cases,
    arguments,
    assert_moments_close,
    make_input,
    make_mask,
    operator,
    reference_moments,
    sum_tolerance,
    to_layout,
)
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn.ops import batch_norm
from syncbn.ops.epilogue import NUMBERS

# The shapes of tests without masks, and planes and rows with chunks that end anywhere.
SOME = [(2, 1), (129, 65), (5, 2049), (2, 3, 5, 7), (4, 1, 9, 11), (3, 17, 7, 7), (3, 2, 131, 257)]
MANY = [(20, 70, 9, 11), (300, 6, 50), (300, 40, 5, 5), (70, 600, 3)]
CASES = all_cases([*SOME, *MANY])
NONSENSE = torch.tensor([math.nan, math.inf, -math.inf])


def spoil(x, mask):
    """Return the tensor with NaN and infinities at masked positions."""
    nonsense = NONSENSE.to(x.dtype)[torch.arange(x.numel()) % 3].view(x.shape)
    spoiled = torch.where(mask.unsqueeze(1), x, nonsense)
    return torch.empty_like(x).copy_(spoiled)  # in the layout of x


def valid(x, mask):
    """Return the unmasked values as rows: [n, C]."""
    return x.movedim(1, -1)[mask]


def cleared(x, mask):
    return torch.where(mask.unsqueeze(1), x, 0.0)


def operands(shape, layout, dtype):
    x = make_input(shape, layout, dtype)
    mask = make_mask(x)
    dy, residual = (make_input(shape, layout, dtype, mean=0.1, std=1.0, seed=s) for s in (1, 2))
    return x, dy, residual, mask


@pytest.mark.any_torch
@pytest.mark.parametrize(("shape", "layout", "dtype"), CASES)
def test_moments_match_float64(shape, layout, dtype):
    x, _, _, mask = operands(shape, layout, dtype)
    message = ops.batch_norm_stats(spoil(x, mask), mask=mask)
    assert_moments_close(message, valid(x, mask))


@pytest.mark.any_torch
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("share", [0.001, 0.1, 0.999])
@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
def test_variance_survives_a_large_mean(layout, share, ratio):
    x = make_input((16, 5, 24, 24), layout, torch.float32, mean=ratio, std=1.0)
    mask = torch.rand(16, 24, 24, generator=torch.Generator().manual_seed(0)) < share
    message = ops.batch_norm_stats(spoil(x, mask), mask=mask)
    rows = valid(x, mask)
    mean = message[:5] / message[-1]
    var = message[5:10] / message[-1] - mean * mean
    _, expected = reference_moments(rows)
    # As in test_batch_norm_stats.py.
    bound = 4 * 1.1e-16 * ratio**2 + 1e-6
    torch.testing.assert_close(var, expected, rtol=bound, atol=0.0)


@pytest.mark.any_torch
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_misleading_samples_cost_no_accuracy(layout, dtype):
    """The CPU guesses each mean from a few values, all of which are far off here."""
    x = make_input((1, 3, 128, 128), "contiguous", dtype, mean=0.0, std=1.0)
    mask = make_mask(x)
    positions = mask.flatten().nonzero().flatten()
    x.view(3, -1)[:, positions[[len(positions) * (2 * i + 1) // 16 for i in range(8)]]] = 1e3
    message = ops.batch_norm_stats(to_layout(spoil(x, mask), layout), mask=mask)
    assert_moments_close(message, valid(x, mask))


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((1, 3, 128, 128), "contiguous"),
        ((1, 3, 128, 128), "channels_last"),
        ((900, 3, 5), "contiguous"),
    ],
)
def test_mean_near_the_largest_half(shape, layout):
    """The CPU's guess of this mean, 62316, is rounded to a multiple of 16384: 65536."""
    x = torch.full(shape, 65504.0, dtype=torch.float16)
    mask = make_mask(x)
    image, *position = mask.nonzero()[mask.sum() // 16].tolist()  # the first of eight samples
    x[(image, slice(None), *position)] = 40000.0
    message = ops.batch_norm_stats(to_layout(spoil(x, mask), layout), mask=mask)
    assert_moments_close(message, valid(x, mask))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("positions", [0, 1, 2])
def test_few_positions(layout, positions):
    x = make_input((3, 5, 40, 7), layout, torch.float32)
    mask = torch.zeros(3, 40, 7, dtype=torch.bool)
    mask[2, 39, :positions] = True
    assert_moments_close(ops.batch_norm_stats(spoil(x, mask), mask=mask), valid(x, mask))


def test_segments_without_positions():
    """Whole tasks, in the middle and at the ends, have no unmasked position."""
    x = make_input((3, 2, 131, 2570), "contiguous", torch.float32)
    for sample in range(3):
        mask = torch.zeros(3, 131, 2570, dtype=torch.bool)
        mask[sample, ::2] = True
        assert_moments_close(ops.batch_norm_stats(spoil(x, mask), mask=mask), valid(x, mask))


@pytest.mark.any_torch
@pytest.mark.parametrize(("shape", "layout", "dtype"), CASES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_outputs_are_those_without_a_mask_or_zero(shape, layout, dtype, activation):
    """The same bits: a mask changes the statistics, but not the formulas that use them."""
    x, dy, residual, mask = operands(shape, layout, dtype)
    totals = ops.batch_norm_stats(x, mask=mask)
    constants = None if activation is None else x.new_empty(2 * shape[1], dtype=torch.float64)
    epilogue = (NUMBERS[activation], 0.25, constants)
    normalization = (totals, None, None, None, None, None, 0.1, 1e-5, None, None)
    spoiled, spoiled_residual = spoil(x, mask), spoil(residual, mask)
    for own, other in ((None, None), (residual, spoiled_residual)):
        plain, mean, invstd, count = ops.batch_norm_apply(x, *normalization, own, *epilogue)
        output, *_ = ops.batch_norm_apply(spoiled, *normalization, other, *epilogue, mask=mask)
        assert output.stride() == x.stride()
        assert torch.equal(output, cleared(plain, mask))
    epilogue_gradient = (constants, *epilogue[:2])
    sums = totals.new_ones(2 * shape[1])
    of_input = (mean, invstd, None, sums, count, None, None, *epilogue_gradient)
    plain = ops.batch_norm_backward_apply(dy, x, *of_input)
    grad = ops.batch_norm_backward_apply(spoil(dy, mask), spoiled, *of_input, mask=mask)
    assert torch.equal(grad, cleared(plain, mask))


@pytest.mark.any_torch
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("shape", "layout", "dtype"), CASES)
def test_sums_match_float64(shape, layout, dtype, activation):
    x, dy, _, mask = operands(shape, layout, dtype)
    rows, dy_rows = valid(x, mask), valid(dy, mask)
    if len(rows) == 0:
        rows, dy_rows = rows.new_zeros(1, shape[1]), rows.new_zeros(1, shape[1])
    mean, var = reference_moments(rows)
    invstd = (var + 1e-5).rsqrt()
    constants = None if activation is None else torch.cat([invstd, torch.zeros_like(mean)])
    epilogue_gradient = (None, constants, NUMBERS[activation], 0.0)
    dtypes = (torch.float64, torch.float64)
    spoiled = (spoil(dy, mask), spoil(x, mask))
    sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
        *spoiled, mean, invstd, *dtypes, *epilogue_gradient, mask=mask
    )
    xhat = (rows.double() - mean) * invstd
    dz = dy_rows.double()
    if activation == "silu":
        z = xhat
        dz = dz * torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z)))
    # A few roundings of dz itself and of z, which is computed in float.
    extra = 1 if activation is None else 4
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    bound = extra * sum_tolerance(dtype, dz) + 8 * eps * (extra - 1) * dy_rows.double().abs().sum(0)
    assert ((sums[: shape[1]] - dz.sum(0)).abs() <= bound).all()
    # Half an eps of the deviation from the center, which is the mean rounded to float.
    terms = dz * xhat
    bound = extra * sum_tolerance(dtype, terms) + 8 * eps * (
        dz.abs() * (xhat.abs() + extra - 1) + mean.abs() * invstd * dz.abs()
    ).sum(0)
    assert ((sums[shape[1] :] - terms.sum(0)).abs() <= bound).all()
    assert torch.equal(grad_weight, sums[shape[1] :]) and torch.equal(grad_bias, sums[: shape[1]])


@pytest.mark.any_torch
@pytest.mark.parametrize(("shape", "layout", "dtype"), CASES)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_stored_gradients_are_those_without_a_mask_or_zero(shape, layout, dtype, activation):
    x, dy, residual, mask = operands(shape, layout, dtype)
    mean, var = reference_moments(x)
    invstd = (var + 1e-5).rsqrt()
    is_silu = activation == "silu"
    constants = torch.cat([invstd, torch.zeros_like(mean)]) if is_silu else None
    given = (residual, None) if is_silu else (None, residual)  # of any sign
    reduction = (mean, invstd, torch.float64, torch.float64, None)
    epilogue_gradient = (constants, NUMBERS[activation], 0.25)
    *_, plain = ops.batch_norm_backward_reduce_dz(dy, x, *reduction, *epilogue_gradient, *given)
    spoiled = (None if t is None else spoil(t, mask) for t in (dy, x, *given))
    grad, values, *others = spoiled
    sums, *_, dz = ops.batch_norm_backward_reduce_dz(
        grad, values, *reduction, *epilogue_gradient, *others, mask=mask
    )
    assert torch.equal(dz, cleared(plain, mask))
    # Sums of the unrounded gradient: stored values differ by half an eps, or half an eps of the
    # smallest normal number.
    stored = valid(dz, mask).double()
    info = torch.finfo(dtype)
    rounding = info.eps / 2 * stored.abs().clamp(min=info.smallest_normal).sum(0)
    bound = sum_tolerance(dtype, dz) + rounding
    assert ((sums[: shape[1]] - stored.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 3, 40), "contiguous"),
        ((2, 3, 5), "contiguous"),
        ((2, 3, 4, 5), "channels_last"),
    ],
)
def test_stored_gradients_are_zero_beside_an_infinity(shape, layout):
    x, dy, residual, mask = operands(shape, layout, torch.float32)
    x[(0, 0, *mask[0].nonzero()[0].tolist())] = torch.inf
    statistics = torch.full((3,), torch.nan, dtype=torch.float64)
    sums = (torch.float64, torch.float64, None)
    epilogue_gradient = (torch.full((6,), torch.nan).double(), NUMBERS["silu"], 0.0)
    *_, dz = ops.batch_norm_backward_reduce_dz(
        dy, x, statistics, statistics, *sums, *epilogue_gradient, residual, None, mask=mask
    )
    assert torch.equal(dz.isnan(), mask.unsqueeze(1).expand_as(dz))
    assert not dz.movedim(1, -1)[~mask].any()


@pytest.mark.parametrize(
    ("layout", "dtype"), [("contiguous", torch.float64), ("channels_last", torch.bfloat16)]
)
@pytest.mark.parametrize("name", MASKED_OPS)
def test_opcheck(name, layout, dtype):
    torch.library.opcheck(
        operator(name),
        arguments(name, make_input((3, 4, 5, 2), layout, dtype)),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


X = make_input((3, 4, 5), "contiguous", torch.float32)


@pytest.mark.parametrize("name", MASKED_OPS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(3, 5), "have dtype bool, but got float32"),
        (
            torch.ones(3, 4, dtype=torch.bool),
            r"have shape \[3, 5\] or \[3, 1, 5\], .* but got \[3, 4\]",
        ),
        (torch.ones(5, 3, dtype=torch.bool).t(), r"be contiguous, but got strides \[1, 3\]"),
    ],
)
def test_bad_mask_is_named(name, bad, message):
    args = arguments(name, X)
    with pytest.raises(RuntimeError, match=f"expected mask to {message}"):
        operator(name)(*args[:-1], bad)


@pytest.mark.parametrize("name", MASKED_OPS)
def test_mask_with_one_channel_is_taken(name):
    results = []
    for with_one in (False, True):
        *args, mask = arguments(name, X.clone())
        result = operator(name)(*args, mask.unsqueeze(1) if with_one else mask)
        results.append(result if isinstance(result, tuple) else (result,))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", MASKED_OPS)
def test_mask_without_memory_is_named(name):
    args = arguments(name, X)
    args[-1].untyped_storage().resize_(14)
    with pytest.raises(RuntimeError, match="mask to have memory for its values.* 14 bytes$"):
        operator(name)(*args)


class NoSynchronization(TorchDispatchMode):
    """Refuses operators that would make the host wait for a GPU."""

    WAIT = ("item", "_local_scalar_dense", "nonzero", "masked_select", "index", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert name not in self.WAIT, f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ratio", [1.0, 1e3])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_devices_whose_operators_take_no_mask(monkeypatch, dtype, layout, ratio):
    """Filling masked positions, as on CUDA, gives the same results as the CPU's operators."""
    x = make_input((6, 5, 9, 7), layout, dtype, mean=ratio)
    mask = make_mask(x)
    mask[1] = False
    dy, residual = (make_input(x.shape, layout, dtype, std=1.0, seed=s) for s in (1, 2))
    spoiled = [spoil(tensor, mask) for tensor in (x, dy, residual)]
    epilogue_gradient = (x.new_empty(10, dtype=torch.float64), NUMBERS["silu"], 0.0)

    def run():
        x, dy, residual = spoiled
        epilogue = (*epilogue_gradient[1:], epilogue_gradient[0])
        message = ops.batch_norm_stats(x, mask=mask)
        output, mean, invstd, count = ops.batch_norm_forward(
            x, None, None, None, None, None, 0.1, 1e-5, residual, *epilogue, mask=mask
        )
        dtypes = (torch.float64, torch.float64)
        grads = ops.batch_norm_backward(
            dy, x, mean, invstd, None, count, *dtypes, *epilogue_gradient, mask=mask
        )
        *sums, dz = ops.batch_norm_backward_reduce_dz(
            dy, x, mean, invstd, *dtypes, None, *epilogue_gradient, residual, None, mask=mask
        )
        return message, output, mean, invstd, count, *grads, *sums, dz

    expected = run()
    monkeypatch.setattr(batch_norm, "_takes_mask", lambda mask: False)
    with NoSynchronization():
        actuals = run()
    for actual, right in zip(actuals, expected, strict=True):
        # 1e-6 of float sums of squares, of deviations from the fill values, and of the message's
        # own rounding, 1.1e-16 * ratio²; then a rounding to dtype.
        eps = 2 * torch.finfo(actual.dtype).eps if actual.dim() > 1 else 0.0
        torch.testing.assert_close(actual, right, rtol=2e-6 + eps, atol=2e-6 * ratio + eps)
