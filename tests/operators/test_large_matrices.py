"""Reductions of large matrices, whose tasks have more columns than those of small ones."""

import pytest
import torch
from support import ops
from support.cases import (
    DTYPES,
    RELU,
    assert_moments_close,
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
    mean, var = reference_moments(rows)
    invstd = (var + 1e-5).rsqrt()

    assert_moments_close(ops.batch_norm_stats(x, mask=mask), rows)
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
