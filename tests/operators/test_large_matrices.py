"""Reductions of large matrices, whose tasks have more columns than those of small ones."""

import pytest
import torch
from support import ops
from support.cases import (
    DTYPES,
    RELU,
    make_input,
    make_mask,
    reference_moments,
    sum_tolerance,
)

pytestmark = pytest.mark.any_torch

# Two million values: tasks of 1024 columns and of 5; and tasks of 341 planes of 3 values.
SHAPES = [(2050, 1029), (2100, 342, 3)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_match_float64(shape, dtype, masked):
    x = make_input(shape, "contiguous", dtype)
    dy, output = (make_input(shape, "contiguous", dtype, mean=0.1, seed=seed) for seed in (1, 2))
    mask = make_mask(x) if masked else None
    rows, of_dy, of_output = (
        t.movedim(1, -1)[mask] if masked else t.movedim(1, -1).flatten(0, -2)
        for t in (x, dy, output)
    )
    n, channels = rows.shape
    mean, var = reference_moments(rows)
    invstd = (var + 1e-5).rsqrt()

    message = ops.batch_norm_stats(x, mask=mask)
    ours = message[:channels] / n
    assert message[-1] == n
    assert ((ours - mean).abs() <= sum_tolerance(dtype, rows.double()) / n).all()
    error = (message[channels:-1] / n - ours.square() - var).abs()
    squares = (rows.double() - mean).square()
    # As in test_batch_norm_stats.py.
    of_message = 4 * torch.finfo(torch.float64).eps * (mean.square() + var)
    assert (error <= sum_tolerance(dtype, squares) / n + of_message).all()

    xhat = (rows.double() - mean) * invstd
    reduction = (dy, x, mean, invstd)
    check_reduced(ops.batch_norm_backward_reduce(*reduction, mask=mask)[0], of_dy, xhat)
    activation = (torch.float64, torch.float64, None, None, RELU, 0.0, None, output)
    sums, *_ = ops.batch_norm_backward_reduce_dz(*reduction, *activation, mask=mask)
    check_reduced(sums, torch.where(of_output > 0, of_dy, 0.0), xhat)


def check_reduced(sums, dz, xhat):
    products = dz.double() * xhat
    expected = torch.cat([dz.double().sum(0), products.sum(0)])
    tolerance = torch.cat([sum_tolerance(dz.dtype, t) for t in (dz.double(), products)])
    assert ((sums - expected).abs() <= tolerance).all()
