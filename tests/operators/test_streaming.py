"""Outputs that no cache holds are written past the caches, and are those of small inputs."""

from pathlib import Path

import pytest
import torch
from cases import DTYPES, make_input, make_mask
from operator_times import shortest_time

from syncbn import ops

pytestmark = pytest.mark.any_torch

CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

# Planes that begin anywhere in a line of a cache, rows of whole packs, and rows of none.
INPUTS = [
    ((48, 14, 14), "contiguous"),
    ((5, 57, 57), "contiguous"),
    ((64, 14, 14), "channels_last"),
    ((50, 7, 7), "channels_last"),
]


def large_shape(image, dtype):
    """So many images that one tensor alone does not fit the last cache."""
    cache = int(CACHE.read_text().strip()[:-1]) << 10 if CACHE.exists() else 32 << 20
    of_image = torch.Size(image).numel() * dtype.itemsize
    return (cache // of_image + 2, *image)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("image", "layout"), INPUTS)
def test_large_outputs_are_those_of_their_parts(image, layout, dtype):
    shape = large_shape(image, dtype)
    x = make_input(shape, layout, dtype)
    dy = make_input(shape, layout, dtype, seed=1)
    totals = ops.batch_norm_stats(x)
    running = (None, None, None, 0.1, 1e-5)

    def apply(x):
        return ops.batch_norm_apply(x, totals, None, None, *running)

    _, mean, invstd, count = apply(x[:1])
    sums, _, _ = ops.batch_norm_backward_reduce(dy, x, mean, invstd)

    def backward(dy, x):
        return ops.batch_norm_backward_apply(dy, x, mean, invstd, None, sums, count)

    # Memory that is handed out again shows what is not written.
    torch.full_like(x, torch.nan)
    assert torch.equal(apply(x)[0], torch.cat([apply(part)[0] for part in x.split(8)]))
    torch.full_like(x, torch.nan)
    parts = [backward(*both) for both in zip(dy.split(8), x.split(8), strict=True)]
    assert torch.equal(backward(dy, x), torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("image", "layout"), INPUTS)
def test_large_masked_outputs_are_those_without_a_mask_or_zero(image, layout, dtype):
    x = make_input(large_shape(image, dtype), layout, dtype)
    mask = make_mask(x)
    normalization = (ops.batch_norm_stats(x), None, None, None, None, None, 0.1, 1e-5)
    torch.full_like(x, torch.nan)
    masked, *_ = ops.batch_norm_apply(x, *normalization, mask=mask)
    plain, *_ = ops.batch_norm_apply(x, *normalization)
    assert torch.equal(masked, torch.where(mask.unsqueeze(1), plain, 0.0))


def test_large_outputs_of_any_planes_are_written_fast():
    """A line that is written both past the caches and into them takes many times as long."""
    x = make_input(large_shape((256, 7, 7), torch.float32), "contiguous", torch.float32)
    totals = ops.batch_norm_stats(x)

    def apply():
        ops.batch_norm_apply(x, totals, None, None, None, None, None, 0.1, 1e-5)

    # Both take new memory, which is most of the time: 1.0 was measured, and with such lines 3 to 5.
    assert shortest_time(apply) < 2 * shortest_time(x.clone)
