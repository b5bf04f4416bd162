"""Outputs larger than the caches bypass them, with the same results as small inputs.

Those in new memory do not, and get huge pages.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ops
from support.cases import DTYPES, make_input, make_mask, to_layout
from support.operator_times import shortest_time

pytestmark = pytest.mark.any_torch

CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

# Planes that begin anywhere in a cache line, rows of whole packs, and rows shorter than a pack.
INPUTS = [
    ((48, 14, 14), "contiguous"),
    ((5, 57, 57), "contiguous"),
    ((64, 14, 14), "channels_last"),
    ((50, 7, 7), "channels_last"),
]


def make_large(image, layout, dtype, seed=0):
    """Images that do not fit the last-level cache, as input and output; 17 are different.

    Caches of servers have hundreds of megabytes: to draw as many values would take minutes.
    """
    cache = int(CACHE.read_text().strip()[:-1]) << 10 if CACHE.exists() else 32 << 20
    images = cache // (2 * torch.Size(image).numel() * dtype.itemsize) + 2
    drawn = make_input((17, *image), layout, dtype, seed=seed)
    return to_layout(drawn[torch.arange(images) % 17], layout)


def in_parts(function, *inputs):
    """The results for an eighth of the images at a time, which the last-level cache holds."""
    parts = [x.split(x.size(0) // 8 + 1) for x in inputs]
    return torch.cat(list(map(function, *parts)))


# Options of glibc's mallopt(), as in malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4


@pytest.fixture(params=["new", "reused"])
def memory(request):
    """Whether the memory of a large tensor comes from the system or from one before it."""
    set_option = ctypes.CDLL(None).mallopt
    defaults = {M_TRIM_THRESHOLD: 128 << 10, M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 128 << 10}
    is_new = request.param == "new"
    options = defaults if is_new else {M_TRIM_THRESHOLD: 2**31 - 1, M_MMAP_MAX: 0}
    # AddressSanitizer's allocator refuses options; its memory is new.
    is_glibc = "libasan" not in os.environ.get("LD_PRELOAD", "")
    for option in options.items():
        assert set_option(*option) == is_glibc
    yield
    for option in defaults.items():
        set_option(*option)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("image", "layout"), INPUTS)
def test_large_outputs_are_those_of_their_parts(image, layout, dtype):
    x = make_large(image, layout, dtype)
    dy = make_large(image, layout, dtype, seed=1)
    totals = ops.batch_norm_stats(x)
    running = (None, None, None, 0.1, 1e-5)

    def apply(x):
        return ops.batch_norm_apply(x, totals, None, None, *running)[0]

    _, mean, invstd, count = ops.batch_norm_apply(x[:1], totals, None, None, *running)
    sums, _, _ = ops.batch_norm_backward_reduce(dy, x, mean, invstd)

    def backward(dy, x):
        return ops.batch_norm_backward_apply(dy, x, mean, invstd, None, sums, count)

    # Reused memory shows values that are not written.
    torch.full_like(x, torch.nan)
    assert torch.equal(apply(x), in_parts(apply, x))
    torch.full_like(x, torch.nan)
    assert torch.equal(backward(dy, x), in_parts(backward, dy, x))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("image", "layout"), INPUTS)
def test_large_masked_outputs_are_those_without_a_mask_or_zero(image, layout, dtype):
    x = make_large(image, layout, dtype)
    mask = make_mask(x)
    normalization = (ops.batch_norm_stats(x), None, None, None, None, None, 0.1, 1e-5)
    torch.full_like(x, torch.nan)
    masked, *_ = ops.batch_norm_apply(x, *normalization, mask=mask)
    plain, *_ = ops.batch_norm_apply(x, *normalization)
    assert torch.equal(masked, torch.where(mask.unsqueeze(1), plain, 0.0))


# Prints whether the system was asked for huge pages in the middle of each output, by its flag "hg".
HUGE_PAGES = """
import re, sys
from pathlib import Path
import torch
from syncbn import SyncBatchNorm

def flags(tensor):
    place, is_here = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(bounds[1], 16) <= place < int(bounds[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return line.split()

x = torch.rand(16, 64, 64, 64).to(memory_format=getattr(torch, sys.argv[1])).requires_grad_()
residual = torch.rand_like(x).requires_grad_()
output = SyncBatchNorm(64, activation="relu")(x, residual)
output.backward(torch.ones_like(x))
print(*("hg" in flags(tensor) for tensor in (x, output, x.grad, residual.grad)))
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages"
)
@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_outputs_in_new_memory_get_huge_pages(layout):
    """In a process whose allocator gets each of these tensors from the system."""
    done = subprocess.run(
        [sys.executable, "-c", HUGE_PAGES, layout],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", "True", "True", "True"], done.stderr  # x is torch's


def test_large_outputs_of_any_planes_are_written_fast():
    """A line that is written both past the caches and into them takes many times as long.

    On a busy machine one of two measurements may be slowed down: it is repeated before it counts.
    """
    x = make_large((256, 7, 7), "contiguous", torch.float32)
    totals = ops.batch_norm_stats(x)

    def apply():
        ops.batch_norm_apply(x, totals, None, None, None, None, None, 0.1, 1e-5)

    # Both take new memory, which is most of the time: 1.0 was measured, and with such lines 3 to 5.
    assert any(shortest_time(apply) < 2 * shortest_time(x.clone) for _ in range(10))
