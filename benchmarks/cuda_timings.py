"""Times of layers and operators on a GPU: ``python -m benchmarks.cuda_timings FILE.csv SUITE``.

Eager layers are timed between two events: GPU time, or host time if that is longer. Operators and
copies are launched while the GPU sleeps, so their times are GPU time only. Each call uses the next
of several inputs and keeps its results. Together these exceed four times the L2 cache, so that
nothing is cached.

Imports neither NumPy nor matplotlib, which a machine with a GPU may not have.
"""

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cases import CUDA_SUITES, Case, Suite
from benchmarks.collective_times import collective_rows
from benchmarks.cuda_clocks import eager_clock, gpu_clock, launch_clock
from benchmarks.cuda_layers import make_layers, sending_alone
from benchmarks.fused import fused_calls, fused_cases, timed_fused_rows
from benchmarks.launches import Launches, record_launches
from benchmarks.layer import (
    LAYER_PASSES,
    OPERATOR_PASSES,
    OVERHEAD,
    Buffers,
    Setting,
    copy_call,
    make_buffers,
    operator_calls,
    step_call,
    timed_rows,
)
from benchmarks.rows import Row, write
from benchmarks.stamp import stamp
from benchmarks.timer import Call, Clock, interleave

Samples = dict[str, list[float]]  # seconds by variant and round

CUDA = torch.device("cuda")


def num_buffers(case: Case) -> int:
    """Return the number of tensors that exceeds four times the L2 cache."""
    l2: int = torch.cuda.get_device_properties(CUDA).L2_cache_size
    return 1 + 4 * l2 // case.num_bytes


def keep_results(call: Call, number: int) -> Call:
    """Return a call that keeps its last results, so that the next ones use other memory."""
    kept: deque[object] = deque(maxlen=number)

    def kept_call() -> None:
        kept.append(call())

    return kept_call


def layer_samples(
    case: Case, setting: Setting, turns: Iterator[Buffers], number: int
) -> dict[str, Samples]:
    """Time forward, and forward with backward."""
    layers = make_layers(case, setting.device)
    samples = {}
    for quantity in LAYER_PASSES:
        backward = quantity != "forward"
        variants = {name: step_call(layer, turns, backward) for name, layer in layers.items()}
        samples[quantity] = _interleave(variants, turns, eager_clock, setting.suite, number)
    return samples


def operator_samples(
    case: Case, setting: Setting, turns: Iterator[Buffers], number: int
) -> dict[str, Samples]:
    """Time each operator."""
    calls = operator_calls(case, setting.device, turns)
    samples = _interleave(calls, turns, gpu_clock, setting.suite, number)
    return {name: {"syncbn": samples[name], "copy": samples["copy"]} for name in OPERATOR_PASSES}


def _interleave(
    variants: dict[str, Call], turns: Iterator[Buffers], clock: Clock, suite: Suite, number: int
) -> Samples:
    """Time variants by a clock, and the copy by GPU time."""
    calls = {**variants, "copy": copy_call(turns)}
    calls = {name: keep_results(call, number) for name, call in calls.items()}
    clocks = {**dict.fromkeys(variants, clock), "copy": gpu_clock}
    return interleave(calls, clocks, suite.repeats, suite.sample_seconds)


def case_rows(
    benchmark: str, case: Case, samples: dict[str, Samples], setting: Setting
) -> Iterator[Row]:
    """Yield the rows of a case, with the copy scaled to the same number of bytes."""
    passes = {**LAYER_PASSES, **OPERATOR_PASSES}
    for quantity, by_variant in samples.items():
        copy = [passes[quantity] / 2 * seconds for seconds in by_variant["copy"]]
        pairs = [("copy", name) for name in ("syncbn", "torch") if name in by_variant]
        by_variant = {**by_variant, "copy": copy}
        yield from timed_rows(benchmark, case, quantity, by_variant, setting, pairs)


def timing_rows(setting: Setting) -> Iterator[Row]:
    """Time every case, and add up the consecutive parts of a net."""
    for net, cases in itertools.groupby(setting.suite.cases, key=lambda case: case.net):
        of_net: dict[str, dict[str, Samples]] = {"layer": {}, "operators": {}}
        for case in cases:
            number = num_buffers(case)
            turns = make_buffers(case, setting.device, number)
            layer = layer_samples(case, setting, turns, number)
            operators = operator_samples(case, setting, turns, number)
            suffix = "" if net is None else " of a net"
            yield from case_rows(f"layer{suffix}", case, layer, setting)
            yield from case_rows(f"operators{suffix}", case, operators, setting)
            add_samples(of_net["layer"], layer, case.layers)
            add_samples(of_net["operators"], operators, case.layers)
        if net is not None:
            for benchmark, samples in of_net.items():
                yield from case_rows(benchmark, net, samples, setting)


def fused_rows(setting: Setting) -> Iterator[Row]:
    """Time fused epilogues against separate modules."""
    for case in setting.suite.fused:
        number = num_buffers(case)
        turns = make_buffers(case, setting.device, number)
        theirs = make_layers(case, setting.device)["torch"]
        for fused in fused_cases(case, setting.device):
            calls = fused_calls(fused, theirs, turns)
            samples = _interleave(calls, turns, eager_clock, setting.suite, number)
            yield from timed_fused_rows(fused, samples, setting)


def add_samples(sums: dict[str, Samples], samples: dict[str, Samples], times: int) -> None:
    """Add ``times`` the samples to the sums, round by round."""
    for quantity, by_variant in samples.items():
        of_quantity = sums.setdefault(quantity, {})
        for variant, values in by_variant.items():
            so_far = of_quantity.get(variant, [0.0] * len(values))
            of_quantity[variant] = [a + times * b for a, b in zip(so_far, values, strict=True)]


def overhead_rows(setting: Setting) -> Iterator[Row]:
    """Time the host for a layer with almost nothing to compute."""
    turns = make_buffers(OVERHEAD, setting.device)
    layers = make_layers(OVERHEAD, setting.device)
    for quantity in LAYER_PASSES:
        backward = quantity != "forward"
        variants = {name: step_call(layer, turns, backward) for name, layer in layers.items()}
        clocks = dict.fromkeys(variants, launch_clock)
        suite = setting.suite
        samples = interleave(variants, clocks, suite.repeats, suite.sample_seconds)
        yield from timed_rows("overhead", OVERHEAD, quantity, samples, setting, [])


def launch_rows(setting: Setting) -> Iterator[Row]:
    """Count launches and waits of a layer and its collectives.

    Raises:
        RuntimeError: The profiler saw no kernels.
    """
    turns = make_buffers(OVERHEAD, setting.device)
    for variant, layer in make_layers(OVERHEAD, setting.device).items():
        if variant == "syncbn again":
            continue
        found = {}
        for quantity in LAYER_PASSES:
            call = step_call(layer, turns, backward=quantity != "forward")
            call()
            found[quantity] = record_launches(call)
            if not found[quantity].kernels:
                raise RuntimeError(f"expected kernels of {variant} in the trace, but got none")
        yield from launches_as_rows(variant, found, setting)


def launches_as_rows(variant: str, found: dict[str, Launches], setting: Setting) -> Iterator[Row]:
    """Yield a row of each kind of launch."""
    shape = "x".join(map(str, OVERHEAD.shape))
    inputs = (OVERHEAD.name, OVERHEAD.dtype, OVERHEAD.layout, shape, setting.threads)
    for quantity, launches in found.items():
        for kind, names in launches._asdict().items():
            number = float(len(names))
            values = (number, number, number, "calls", 1)
            row = (*inputs, setting.allocator, f"{quantity}, {kind}", variant, "counted")
            yield Row("launches", *row, *values)


def main(path: str, suite_name: str) -> None:
    """Append the rows to the file."""
    torch.cuda.set_device(0)
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    # torch's allocator reuses memory; the host's threads are idle.
    setting = Setting(CUDA_SUITES[suite_name], CUDA, threads=1, allocator="tuned")
    with sending_alone():
        for rows in (overhead_rows, launch_rows, timing_rows, fused_rows):
            write(Path(path), (stamp(row, CUDA) for row in rows(setting)))
    dist.destroy_process_group()
    worlds = [n for n in setting.suite.worlds if n <= torch.cuda.device_count()]
    if worlds:
        write(Path(path), (stamp(row, CUDA) for row in collective_rows(worlds, "nccl", "cuda")))


if __name__ == "__main__":
    main(*sys.argv[1:])
