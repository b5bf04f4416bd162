"""A model of the CUDA kernels' times, from their plans: ``python -m benchmarks.cuda_plans``.

It needs no GPU: a C++ compiler builds the plan of ``csrc/cuda/kernels/plan.h``, and a few constants
of an H200 turn it into times. **It is a model.** It knows the number of blocks, the bytes and turns
of each block's loads, and the partial sums of the last block. It knows nothing of caches,
instructions, registers, and columns that a block adds up to channels.
"""

import argparse
import ctypes
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.cases import DTYPES, LAYOUTS, Case, resnet50

SOURCE = Path(__file__).with_suffix(".cpp")
# The order of csrc/common/dtype.h.
PLAN_DTYPES = ("float16", "bfloat16", "float32", "float64")

# --- Assumptions

COPY_RATE = 4.3e12 / 132  # bytes per second read and written by a copy, per multiprocessor
MOST_RATE = 2 * COPY_RATE  # the limit of one multiprocessor while others are idle
LAUNCH = 2.0e-6  # seconds before a launch's first instruction plus after its last one
MEMORY = 0.7e-6  # latency of a load from memory
L2 = 0.3e-6  # latency of a load from the L2 cache
STEP = 0.04e-6  # store, barrier, load and addition in shared memory
SIGNAL = 1.0e-6  # writing partial sums, the fence and the counter
HIDDEN = 0.5  # share of a block's latencies hidden by the multiprocessor's other block


class Kernel(NamedTuple):
    """The memory traffic of a kernel."""

    name: str
    inputs: int  # tensors that it reads
    tensors: int  # tensors that it reads or writes
    reduces: bool
    # Dependent loads of a channel's constants before the first value.
    chain: int


KERNELS = (
    Kernel("stats", 1, 1, True, 0),
    Kernel("apply", 1, 2, False, 1),
    Kernel("backward_reduce", 2, 2, True, 0),
    Kernel("backward_apply", 2, 3, False, 1),
)


class Plan(NamedTuple):
    """The split of a tensor over blocks and threads."""

    matrix: int
    vector: int
    aligned: int
    block_x: int
    block_y: int
    channels: int  # per block
    tiles: int
    splits: int
    loads: int  # vectors of each tensor that a thread loads
    members: int  # threads that share a channel
    reducing_threads: int  # threads of the last block that add up the partial sums of a channel
    partial_loads: int  # in flight of a reducing thread
    in_flight: int  # vectors of a thread, of all tensors
    resident: int  # blocks of a multiprocessor

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.tiles * self.splits

    @property
    def partial_bytes(self) -> int:
        """Bytes of partial sums read by the last block of a tile."""
        return 16 * self.channels * self.splits if self.splits > 1 else 0

    @property
    def last_steps(self) -> int:
        """Sequential steps of the last block: loads of partial sums, additions."""
        if self.splits == 1:
            return 0
        return self.partial_turns + math.ceil(math.log2(self.reducing_threads))

    @property
    def partial_turns(self) -> int:
        """Turns in which a reducing thread loads partial sums."""
        return (
            math.ceil(self.splits / (self.reducing_threads * self.partial_loads))
            if self.splits > 1
            else 0
        )


def build(folder: Path) -> ctypes.CDLL:
    """Compile the plan in ``folder``."""
    library = folder / "plans.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC"]
    subprocess.run([*command, SOURCE, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def find_plan(library: ctypes.CDLL, case: Case, multiprocessors: int) -> Plan:
    """Return the plan for a tensor of a case."""
    tensor = torch.empty(case.shape, device="meta")
    if case.layout == "channels_last":
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    dim = tensor.dim()
    sizes = (ctypes.c_int64 * dim)(*tensor.shape)
    strides = (ctypes.c_int64 * dim)(*tensor.stride())
    fields = (ctypes.c_int64 * len(Plan._fields))()
    dtype = PLAN_DTYPES.index(case.dtype)
    library.find_plan.restype = ctypes.c_bool
    if not library.find_plan(sizes, strides, ctypes.c_int64(dim), dtype, multiprocessors, fields):
        raise ValueError(f"{case} is neither contiguous nor channels-last")
    return Plan(*fields)


def waves(plan: Plan, multiprocessors: int) -> list[int]:
    """Return the number of blocks of each wave."""
    resident = plan.resident * multiprocessors
    whole, rest = divmod(plan.blocks, resident)
    return [resident] * whole + [rest] * (rest > 0)


def kernel_seconds(kernel: Kernel, plan: Plan, case: Case, multiprocessors: int) -> float:
    """Return the modeled time of a kernel."""
    of_block = kernel.tensors * case.num_bytes / plan.blocks
    turns = math.ceil(plan.loads / (plan.in_flight // kernel.inputs))
    latencies = MEMORY + kernel.chain * L2
    if kernel.reduces:
        latencies += math.ceil(math.log2(plan.members)) * STEP
    seconds = LAUNCH
    for wave, blocks in enumerate(waves(plan, multiprocessors)):
        busy = min(blocks, multiprocessors)
        rate = min(multiprocessors * COPY_RATE, busy * MOST_RATE)
        seconds += max(blocks * of_block / rate, (turns - 1) * MEMORY)
        seconds += latencies if wave == 0 else (1 - HIDDEN) * latencies
    if kernel.reduces and plan.splits > 1:
        steps = plan.last_steps - plan.partial_turns
        reading = max(plan.partial_bytes / MOST_RATE, plan.partial_turns * L2)
        seconds += SIGNAL + reading + steps * STEP
    return seconds


def copy_seconds(kernel: Kernel, case: Case, multiprocessors: int) -> float:
    """Return the modeled time of a copy of as many bytes."""
    return LAUNCH + MEMORY + kernel.tensors * case.num_bytes / (multiprocessors * COPY_RATE)


def net_lines(library: ctypes.CDLL, cases: Sequence[Case], multiprocessors: int) -> list[str]:
    """Return the table of a net's layers."""
    lines = []
    totals = [0.0] * (2 * len(KERNELS))
    for case in cases:
        plan = find_plan(library, case, multiprocessors)
        times = [kernel_seconds(kernel, plan, case, multiprocessors) for kernel in KERNELS]
        copies = [copy_seconds(kernel, case, multiprocessors) for kernel in KERNELS]
        _, channels, height, _ = case.shape
        kind = "matrix" if plan.matrix else "planar" if plan.aligned else "unaligned"
        cells = [
            f"{case.layers} x {channels}x{height}x{height}",
            f"{kind} {plan.vector}",
            f"{plan.block_x}x{plan.block_y}",
            f"{plan.tiles}x{plan.splits}",
            f"{plan.blocks / (plan.resident * multiprocessors):.2f}",
            f"{case.num_bytes / plan.blocks / 1024:.0f}",
            f"{plan.loads}",
            f"{plan.partial_bytes / 1024:.0f}",
            f"{plan.last_steps}",
            *(f"{1e6 * t:.1f} ({c / t:.0%})" for t, c in zip(times, copies, strict=True)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        totals = [
            total + case.layers * seconds
            for total, seconds in zip(totals, (*times, *copies), strict=True)
        ]
    pairs = zip(totals[: len(KERNELS)], totals[len(KERNELS) :], strict=True)
    sums = [f"{1e6 * t:.0f} ({c / t:.0%})" for t, c in pairs]
    lines.append(f"| all layers {'| ' * 9}{' | '.join(sums)} |")
    return lines


HEAD = (
    "| layers | kernel, values a load | threads | tiles x segments | waves | KB a block reads "
    "| loads a thread | KB of partials, last block | its steps | "
    + " | ".join(f"{kernel.name}, us" for kernel in KERNELS)
    + " |"
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_plans", description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=(32, 64, 256))
    parser.add_argument("--multiprocessors", type=int, nargs="+", default=(132, 40))
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"), choices=DTYPES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        print("A model, not a measurement. In parentheses: speed relative to a copy.")
        for multiprocessors in args.multiprocessors:
            for images in args.images:
                for dtype in args.dtypes:
                    for layout in LAYOUTS:
                        title = (
                            f"{images} images, {dtype}, {layout}, {multiprocessors} multiprocessors"
                        )
                        print(f"\n## ResNet-50, {title}\n\n{HEAD}\n|{' --- |' * HEAD.count('| ')}")
                        cases = resnet50(images, dtype, layout)
                        print("\n".join(net_lines(library, cases, multiprocessors)))


if __name__ == "__main__":
    main()
