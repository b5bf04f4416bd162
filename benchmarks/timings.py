"""Times on the CPU, under the allocator that this process was started with.

``python -m benchmarks.timings FILE.csv SUITE ALLOCATOR`` appends to the file; run.py starts it.
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

# glibc hands the pages of large freed tensors back to the system, and each output that is
# allocated after that costs a page fault every 4 kB: as long as the work itself. These keep the
# pages. The C library reads them when the process starts, so it must be another process.
ALLOCATORS = {
    "tuned": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(1 << 28),
    },
    "default": {},
}


def touch_memory(tensor_bytes: int) -> None:
    """Have the system provide the pages that the tuned allocator will hand out from now on.

    Without that it would come by them one tensor after another, in the first samples. A step holds
    six tensors at once; the rest is for the holes that small allocations leave between them.
    """
    torch.zeros(16 * tensor_bytes, dtype=torch.uint8)


def timing_rows(suite_name: str, allocator: str) -> Iterator[Row]:
    """Time everything by one thread and by all; with the default allocator the layer by all."""
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
    """Time what follows a layer, in its own passes and as modules."""
    turns = make_buffers(case, CPU)
    theirs = make_layers(case, CPU)["torch"]
    for fused in fused_cases(case, CPU):
        calls = {**fused_calls(fused, theirs, turns), "copy": copy_call(turns)}
        yield from timed_fused_rows(fused, time_variants(calls, setting), setting)


def main(path: str, suite_name: str, allocator: str) -> None:
    """Append the rows to the file."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it
    # A group of one: what a layer asks of torch.distributed is asked, and nothing is sent.
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if allocator == "tuned":
        touch_memory(max(case.num_bytes for case in SUITES[suite_name].cases))
    rows = timing_rows(suite_name, allocator)
    write(Path(path), (stamp(row, CPU) for row in rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
