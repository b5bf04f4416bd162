"""The plan of a kernel's launch: which kernel, and how many blocks."""

import math

import pytest
import torch
from support.cases import CUDA_SHAPES, DTYPES, UNALIGNED_SHAPES, layouts, to_layout
from support.emulated import MULTIPROCESSORS, Device, placed


def test_cases_reach_every_kernel(library):
    reached = set()
    for dtype in DTYPES:
        for shape in CUDA_SHAPES + UNALIGNED_SHAPES:
            for layout in layouts(shape):
                for offset in (0, 1, 2) if shape in UNALIGNED_SHAPES else (0,):
                    x = placed(to_layout(torch.empty(shape, dtype=dtype), layout), offset)
                    for multiprocessors in MULTIPROCESSORS:
                        plan = Device(library, multiprocessors, "forward").plan(x)
                        planes = plan["matrix"] and plan["values"] > 1
                        kernel = (plan["matrix"] + planes, plan["vector"], plan["aligned"])
                        reached.add((dtype, *kernel, plan["splits"] > 1))
    expected = set()
    for dtype in DTYPES:
        widest = 16 // dtype.itemsize
        kernels = {(1, 1, 1), (1, widest, 1), (0, 1, 1), (0, widest, 1), (0, widest, 0)}
        kernels.add((2, widest, 1))  # planes as columns
        if dtype.itemsize == 2:
            kernels.add((1, 2, 1))
        expected |= {(dtype, *kernel, split) for kernel in kernels for split in (True, False)}
    assert reached == expected


DECISIONS = {
    "a channel is split over blocks": (
        ((32, 64, 56, 56), "contiguous", torch.bfloat16),
        {"matrix": 0, "vector": 8, "block_x": 256, "tiles": 64, "splits": 4},
    ),
    "several channels in a block": (
        ((64, 1024, 14, 14), "contiguous", torch.float32),
        {"block_x": 64, "block_y": 4, "tiles": 256, "splits": 1},
    ),
    "tiny planes are columns": (((256, 64, 2, 2), "contiguous", torch.float32), {"matrix": 1}),
    "small planes of whole vectors stay planes": (
        ((256, 64, 4, 4), "contiguous", torch.float32),
        {"matrix": 0, "aligned": 1},
    ),
    "wide tiles where rows are few": (
        ((1, 16384, 3, 3), "contiguous", torch.float32),
        {"matrix": 1, "block_x": 144, "tiles": 256},
    ),
    "one wave of wider tiles instead of two": (
        ((32, 1024, 14, 14), "contiguous", torch.bfloat16),
        {"matrix": 1, "block_x": 98, "tiles": 256, "splits": 1},
    ),
    "rows fill the blocks of a wave": (
        ((32, 64, 56, 56), "channels_last", torch.float32),
        {"matrix": 1, "vector": 4, "tiles": 2, "splits": 132},
    ),
}


@pytest.mark.parametrize(("tensor", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_decisions_of_the_plan(library, tensor, expected):
    shape, layout, dtype = tensor
    x = to_layout(torch.empty(shape, dtype=dtype), layout)
    plan = Device(library, 132, "forward").plan(x)
    assert {name: plan[name] for name in expected} == expected


@pytest.mark.parametrize(
    "shape",
    [(2**33, 3), (2**22, 4096), (1, 2**32), (64, 3, 2**13, 2**13), (2**31 + 5, 1), (7, 2**24, 9)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiprocessors", [1, 132, 1000])
def test_huge_tensors_keep_to_the_limits_of_a_grid(library, shape, dtype, multiprocessors):
    x = torch.empty(shape, dtype=dtype, device="meta")
    plan = Device(library, multiprocessors, "forward").plan(x)
    assert plan["tiles"] < 2**31 and plan["splits"] < 2**16
    assert plan["block_x"] * plan["block_y"] <= 256
    # A float counts the values of a matrix's column, or of a channel, exactly.
    assert plan["share"] * (1 if plan["matrix"] else plan["vector"]) <= 2**24
    assert plan["share"] * plan["values"] * plan["splits"] >= x.numel() / x.size(1)


@pytest.mark.parametrize("channels", [1064, 1200, 2048, 2128, 4096])
@pytest.mark.parametrize("multiprocessors", [40, 108, 132])
@pytest.mark.parametrize(("size", "dtype"), [(28, torch.bfloat16), (14, torch.float32)], ids=str)
def test_no_wave_of_blocks_is_half_empty(library, channels, size, dtype, multiprocessors):
    x = torch.empty(256, channels, size, size, dtype=dtype, device="meta")
    plan = Device(library, multiprocessors, "forward").plan(x)
    blocks, resident = plan["tiles"] * plan["splits"], 2 * multiprocessors
    assert (
        blocks / (resident * math.ceil(blocks / resident)) > 0.85
    )  # 0.9, or the maximum if that is less


def test_few_partial_sums_are_left_to_one_block(library):
    """One multiprocessor reads the partial sums, so they must be few."""
    for dtype in DTYPES:
        for channels in (24, 32, 42, 64, 65, 256, 2048):
            x = torch.empty(200_000, channels, dtype=dtype, device="meta")
            for multiprocessors in (132, 1000):
                plan = Device(library, multiprocessors, "forward").plan(x)
                owned = plan["block_x"] * plan["vector"]
                # Half of a narrower row would be less than a sector.
                is_narrow = owned * dtype.itemsize < 64
                assert 16 * owned * plan["splits"] <= 96 * 1024 or is_narrow
