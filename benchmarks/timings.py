"""Times on the CPU, with the allocator settings of this process.

run.py runs ``python -m benchmarks.timings FILE.csv SUITE ALLOCATOR``, which appends to the file.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cases import SUITES, Case
from benchmarks.fused import fused_calls, fused_cases, timed_fused_rows
from benchmarks.layer import (
    Setting,
    copy_call,
    layer_rows,
    make_buffers,
    make_layers,
    operator_rows,
    overhead_rows,
    time_variants,
)
from benchmarks.rows import Row, write
from benchmarks.stamp import stamp
from benchmarks.sweep import sweep_rows

CPU = torch.device("cpu")

# glibc returns the pages of large freed tensors to the system. Each new output then costs a page
# fault every 4 kB, as long as the work itself. These settings keep the pages. The C library reads
# them at startup, so they need a new process.
ALLOCATORS = {
    "tuned": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(1 << 28),
    },
    "default": {},
}


def touch_memory(tensor_bytes: int) -> None:
    """Map the pages that the tuned allocator will reuse.

    Otherwise the first samples would map them. A step holds six tensors at once; the rest is for
    gaps between small allocations.
    """
    torch.zeros(16 * tensor_bytes, dtype=torch.uint8)


def timing_rows(suite_name: str, allocator: str) -> Iterator[Row]:
    """Time everything with one and with all threads; with the default allocator only layers."""
    suite = SUITES[suite_name]
    every = torch.get_num_threads()
    threads = {1, every} if allocator == "tuned" else {every}
    for number in sorted(threads):
        torch.set_num_threads(number)
        setting = Setting(suite, CPU, number, allocator)
        for case in suite.cases:
            yield from layer_rows(case, setting)
            if allocator == "tuned":
                yield from operator_rows(case, setting)
        if allocator == "tuned":
            for case in suite.fused:
                yield from fused_rows(case, setting)
            yield from sweep_rows(setting)
        yield from overhead_rows(setting)
    torch.set_num_threads(every)


def fused_rows(case: Case, setting: Setting) -> Iterator[Row]:
    """Time fused epilogues against separate modules."""
    turns = make_buffers(case, CPU)
    theirs = make_layers(case, CPU)["torch"]
    for fused in fused_cases(case, CPU):
        calls = {**fused_calls(fused, theirs, turns), "copy": copy_call(turns)}
        yield from timed_fused_rows(fused, time_variants(calls, setting), setting)


def main(path: str, suite_name: str, allocator: str) -> None:
    """Append the rows to the file."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it
    # A group of one rank: layers call torch.distributed, but send nothing.
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if allocator == "tuned":
        touch_memory(max(case.num_bytes for case in SUITES[suite_name].cases))
    rows = timing_rows(suite_name, allocator)
    write(Path(path), (stamp(row, CPU) for row in rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
