"""Sums of the CUDA kernels, as nvcc compiles them, are the same bits in any order of blocks."""

import os
import subprocess
import sys

import pytest
from support.cuda_device import IS_STANDIN
from support.paths import ROOT

pytestmark = [
    pytest.mark.any_torch,
    pytest.mark.cuda,
    pytest.mark.skipif(not IS_STANDIN, reason="a GPU chooses the order of blocks by itself"),
]

# The last two: several threads reduce the partial sums of a channel.
PRINT_SUMS = """
import hashlib, torch
from support.cases import CUDA_SHAPES, DTYPES, layouts, make_input
from support import ops

def bits(tensor):
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()[:16]

for shape in (*CUDA_SHAPES, (5200, 67), (2, 3, 64_001)):
    vectors = torch.zeros(shape[1]).double().cuda(), torch.ones(shape[1]).double().cuda()
    for layout in layouts(shape):
        for dtype in DTYPES:
            x, dy = (make_input(shape, layout, dtype, seed=seed).cuda() for seed in (0, 1))
            sums, *_ = ops.batch_norm_backward_reduce(dy, x, *vectors)
            print(shape, layout, dtype, bits(ops.batch_norm_stats(x)), bits(sums))
"""


def test_sums_are_the_same_bits_in_any_order():
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_SUMS],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "STANDIN_BLOCKS": order,
                "STANDIN_STREAMS": "inline",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for order in ("forward", "reverse", "shuffled")
    ]
    forward, *others = [program.communicate()[0].splitlines() for program in programs]
    assert len(forward) > 100 and [program.returncode for program in programs] == [0, 0, 0]
    assert all(lines == forward for lines in others)
