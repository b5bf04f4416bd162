"""A model of the CUDA kernels' time: the cycles of one multiprocessor, in bfloat16.

It runs on the stand-in for CUDA, which executes the kernels' PTX and times each instruction by its
latency (``docs/standin.md``), with STANDIN_CYCLES=1, and STANDIN_MULTIPROCESSORS and
CYCLES_BANDWIDTH (bytes of a multiprocessor in a cycle) of the GPU::

    python tests/standin/run.py python -m benchmarks.cuda_cycles

**It is a model.** ``tests/standin/kernels/cycles.h`` has its rules. The model ignores ptxas and
registers. Other multiprocessors only take their share of the bandwidth.
"""

import argparse
import ctypes
import os

import torch

import syncbn  # noqa: F401 - registers the operators
from benchmarks.cases import LAYOUTS, Case, resnet50

MEMORY = 500  # cycles: kMemory of cycles.cpp
ops = torch.ops.syncbn

SMALL = [
    Case("", shape, "bfloat16", layout)
    for shape, layout in [
        ((32, 16, 28, 28), "contiguous"),
        ((32, 16, 28, 28), "channels_last"),
        ((32, 32, 14, 14), "contiguous"),
        ((64, 64, 7, 7), "contiguous"),
        ((2, 256, 28, 28), "channels_last"),
        ((30, 17, 28, 28), "channels_last"),
    ]
]
TENSORS = {"stats": 1, "apply": 2, "backward_reduce": 2, "backward_apply": 3}


def take_log() -> list[str]:
    """Return the new lines of the stand-in's log."""
    runtime = ctypes.CDLL(None)
    runtime.standin_take_log.restype = ctypes.c_char_p
    log: bytes = runtime.standin_take_log()
    return log.decode().splitlines()


def model(case: Case) -> list[tuple[int, int]]:
    """Return the cycles of the four kernels, and of their ends after the last load of a tensor."""
    x, dy = (case.tensor(torch.device("cpu"), seed).cuda() for seed in (0, 1))
    take_log()
    totals = ops.batch_norm_stats(x)
    _, mean, invstd, count = ops.batch_norm_apply(x, totals, *(None,) * 5, 0.1, 1e-5)
    sums, *_ = ops.batch_norm_backward_reduce(dy, x, mean, invstd)
    ops.batch_norm_backward_apply(dy, x, mean, invstd, None, sums, count)
    torch.cuda.synchronize()
    lines = [line.split() for line in take_log()]
    return [(int(line[1]), int(line[2])) for line in lines if line[0] == "cycles"]


def row(case: Case, multiprocessors: int, bandwidth: float) -> str:
    """Return a row of the table."""
    cells = ["x".join(map(str, case.shape)), case.layout]
    for tensors, (cycles, tail) in zip(TENSORS.values(), model(case), strict=True):
        plain = MEMORY + tensors * case.num_bytes / multiprocessors / bandwidth
        cells.append(f"{cycles} ({plain / cycles:.0%}), {tail}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_cycles", description=__doc__)
    parser.add_argument("--images", type=int, help="model ResNet-50 for so many images")
    args = parser.parse_args()
    if "STANDIN_CYCLES" not in os.environ:
        parser.error("expected STANDIN_CYCLES=1 and tests/standin/run.py; see --help")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    bandwidth = float(os.environ.get("CYCLES_BANDWIDTH", "24"))
    cases = SMALL
    if args.images:
        cases = [case for layout in LAYOUTS for case in resnet50(args.images, "bfloat16", layout)]
    print(
        f"A model, not a measurement: {multiprocessors} multiprocessors, {bandwidth:g} bytes a "
        "cycle each. Cycles (speed relative to a plain kernel of as many bytes), cycles after the "
        "last load of a tensor."
    )
    print(f"| shape | layout | {' | '.join(TENSORS)} |\n|{' --- |' * 6}")
    for case in cases:
        print(row(case, multiprocessors, bandwidth), flush=True)


if __name__ == "__main__":
    main()
