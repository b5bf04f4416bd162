"""Times on the CPU, with the allocator settings of this process.

``python -m benchmarks run`` runs ``python -m benchmarks.cpu FILE.csv SUITE ALLOCATOR``, which
appends to the file. ``python -m benchmarks masks`` compares layers with and without masks.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import syncbn
from benchmarks.cases import SUITES, grid, shapes_of_nets
from benchmarks.layer import (
    Setting,
    case_rows,
    fused_rows,
    layer_samples,
    make_buffers,
    make_layers,
    operator_samples,
    overhead_rows,
    step_call,
    timed_rows,
)
from benchmarks.measure import host_clock, interleave
from benchmarks.results import RATIO, STEP, Row, stamp, write
from syncbn.ops import batch_norm

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

SHAPES: dict[str, tuple[int, ...]] = {  # for comparing masks
    "memory": (16, 64, 112, 112),
    "cache": (8, 128, 28, 28),
    "sequences": (32, 256, 400),
}
TINY: dict[str, tuple[int, ...]] = {"tiny": (2, 3, 4)}


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
            yield from case_rows("layer", case, layer_samples(case, setting), setting)
            if allocator == "tuned":
                yield from case_rows("operators", case, operator_samples(case, setting), setting)
        if allocator == "tuned":
            yield from fused_rows(setting)
        yield from sweep_rows(setting)
        yield from overhead_rows(setting, host_clock, [STEP])
    torch.set_num_threads(every)


def sweep_rows(setting: Setting) -> Iterator[Row]:
    """Time a training step of each shape of nets; yield the mean of each net, then of all.

    Shapes chosen by hand may be shapes that the code is tuned for.
    """
    # Many cases compensate for few samples.
    repeats, seconds = min(setting.suite.repeats, 9), setting.suite.sample_seconds / 4
    ratios: dict[tuple[str, str], list[Row]] = {}
    for net, shapes in shapes_of_nets(setting.suite.shapes_per_net).items():
        for case in (case for shape in shapes for case in grid(net, shape, "float32", "bfloat16")):
            turns = make_buffers(case, CPU)
            layers = make_layers(case, setting)
            calls = {name: step_call(layers[name], turns) for name in ("syncbn", "torch")}
            samples = interleave(calls, dict.fromkeys(calls, host_clock), repeats, seconds)
            for row in timed_rows("shape of a net", case, STEP, samples, setting):
                yield row
                if row.variant == RATIO:
                    ratios.setdefault((case.dtype, case.layout), []).append(row)
    for of_kind in ratios.values():
        for net in dict.fromkeys(row.case for row in of_kind):
            yield _mean(net, [row for row in of_kind if row.case == net])
        yield _mean("sweep", of_kind)


def _mean(name: str, rows: list[Row]) -> Row:
    speeds = [row.median for row in rows]
    return replace(
        rows[0],
        benchmark="sweep",
        case=name,
        shape="many",
        kind="geometric mean",
        median=statistics.geometric_mean(speeds),
        q1=min(speeds),
        q3=max(speeds),
        repeats=len(rows),
    )


def make_masks(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return masks of half of the positions: the end of each sample (padding), or random ones."""
    positions = (shape[0], *shape[2:])
    last = torch.arange(positions[-1]).expand(positions)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand((shape[0], *(1,) * (len(shape) - 2)), generator=generator) * shape[-1]
    return {"padding": last < lengths, "any": torch.rand(positions, generator=generator) < 0.5}


def mask_ratios(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> dict[str, str]:
    """Return each mask's time of a training step relative to no mask: median [quartiles].

    ``filled`` is the path of devices whose operators take no mask: torch's operators fill masked
    positions before sums and clear them in outputs.
    """
    x, dy = torch.randn(2, *shape).to(dtype)
    if channels_last:
        x, dy = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, dy))
    x.requires_grad_()
    layer = syncbn.SyncBatchNorm(shape[1])

    def step(mask: Tensor | None) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(x, mask=mask), [x, *layer.parameters()], dy)

    filled = mock.patch.object(batch_norm, "_takes_mask", lambda mask: False)
    calls = {"none": step(None)}
    for name, mask in make_masks(shape).items():
        calls[name], calls[f"{name}, filled"] = step(mask), filled(step(mask))
    samples = interleave(calls, dict.fromkeys(calls, host_clock), 15, 0.05)
    without = samples.pop("none")
    quartiles = {
        name: statistics.quantiles([a / b for a, b in zip(times, without, strict=True)], n=4)
        for name, times in samples.items()
    }
    return {name: f"{q[1]:.2f} [{q[0]:.2f}, {q[2]:.2f}]" for name, q in quartiles.items()}


def mask_lines(shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Compare layers with and without masks: yield a line for each case."""
    for name, shape in shapes.items():
        for dtype in (torch.float32, torch.bfloat16):
            for channels_last in (False, True) if len(shape) == 4 else (False,):
                layout = " channels-last" if channels_last else ""
                ratios = mask_ratios(shape, dtype, channels_last)
                text = "; ".join(f"{mask} {ratio}" for mask, ratio in ratios.items())
                threads = torch.get_num_threads()
                yield f"{name} {shape} {str(dtype)[6:]}{layout}, {threads} threads: {text}"


def main(path: str, suite_name: str, allocator: str) -> None:
    """Append the rows to the file."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it
    # A group of one rank: layers call torch.distributed, but send nothing.
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if allocator == "tuned":
        touch_memory(max(case.num_bytes for case in SUITES[suite_name].cases))
    write(Path(path), stamp(timing_rows(suite_name, allocator), "cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
