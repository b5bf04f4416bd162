"""Times of layers and operators on a GPU: ``python -m benchmarks.cuda FILE.csv SUITE``.

``syncbn`` is our layer and ``torch`` the kernels of torch.nn.SyncBatchNorm, both in an NCCL group
of one rank. Normally a single process skips the group; here both use it, without another rank.
collectives.py measures the cost of other ranks, on several GPUs.

Eager layers are timed between two events: GPU time, or host time if that is longer. Operators,
copies and the kernels of layers in one process are launched while the GPU sleeps, so their times
are GPU time only. Each call uses the next of several inputs and keeps its results. Together these
exceed four times the L2 cache, so that nothing is cached.

Imports neither NumPy nor matplotlib, which a machine with a GPU may not have.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

from benchmarks.cases import CUDA_SUITES, Case
from benchmarks.collectives import collective_rows
from benchmarks.layer import (
    LAYER,
    OVERHEAD,
    Buffers,
    Setting,
    case_rows,
    fused_rows,
    kernel_samples,
    layer_samples,
    make_buffers,
    make_layers,
    norm_options,
    operator_samples,
    overhead_rows,
    step_call,
)
from benchmarks.measure import Call, Samples, eager_clock, gpu_clock, launch_clock, record_launches
from benchmarks.results import Row, spread, stamp, write
from syncbn.distributed import collectives
from syncbn.distributed.state import PassRecord

CUDA = torch.device("cuda")


class TorchLayer(nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm that synchronizes in a group of one too."""

    def forward(self, input: Tensor) -> Tensor:
        """Run the training code of torch's layer for a larger group."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        buffers = (self.running_mean, self.running_var, self.eps, self.momentum)
        output: Tensor = TorchSyncBatchNorm.apply(
            input, self.weight, self.bias, *buffers, dist.group.WORLD, 1
        )
        return output


def make_theirs(case: Case, device: torch.device) -> nn.Module:
    """Return torch's layer."""
    return TorchLayer(case.shape[1], **norm_options(case, device))


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Make our layers run collectives in a group of one rank."""

    def is_in(record: PassRecord, group: object) -> bool:
        return record.state is not None and record.state.get_group() is group

    with (
        mock.patch.object(collectives, "resolve_group", new=lambda _: dist.group.WORLD),
        mock.patch.object(PassRecord, "is_in", new=is_in),
    ):
        yield


def their_operators(case: Case, device: torch.device, turns: Iterator[Buffers]) -> list[Call]:
    """Return a call of each kernel of torch.nn.SyncBatchNorm."""
    channels, first = case.shape[1], next(turns)
    weight = torch.ones(channels, dtype=norm_options(case, device)["dtype"], device=device)
    count = torch.full((1,), first.x.numel() // channels, dtype=torch.int32, device=device)
    mean, invstd = torch.batch_norm_stats(first.x, 1e-5)
    sum_dy, sum_dy_xmu = torch.zeros(2, channels, dtype=mean.dtype, device=device)

    def stats() -> object:
        return torch.batch_norm_stats(next(turns).x, 1e-5)

    def apply() -> object:
        return torch.batch_norm_elemt(next(turns).x, weight, weight, mean, invstd, 1e-5)

    def reduce() -> object:
        b = next(turns)
        return torch.batch_norm_backward_reduce(b.dy, b.x, mean, invstd, weight, True, True, True)

    def backward_apply() -> object:
        b = next(turns)
        return torch.batch_norm_backward_elemt(
            b.dy, b.x, mean, invstd, weight, sum_dy, sum_dy_xmu, count
        )

    return [stats, apply, reduce, backward_apply]


def num_buffers(case: Case) -> int:
    """Return the number of tensors that exceeds four times the L2 cache."""
    l2: int = torch.cuda.get_device_properties(CUDA).L2_cache_size
    return 1 + 4 * l2 // case.num_bytes


Measure = Callable[[Case, Setting], dict[str, Samples]]
IN_A_GROUP: dict[str, Measure] = {"layer": layer_samples, "operators": operator_samples}
IN_ONE_PROCESS: dict[str, Measure] = {"kernels": kernel_samples}


def timing_rows(setting: Setting, benchmarks: dict[str, Measure]) -> Iterator[Row]:
    """Time every case, and add up the consecutive parts of a net."""
    for net, cases in itertools.groupby(setting.suite.cases, key=lambda case: case.net):
        of_net: dict[str, dict[str, Samples]] = {benchmark: {} for benchmark in benchmarks}
        for case in cases:
            suffix = "" if net is None else " of a net"
            for benchmark, measure in benchmarks.items():
                samples = measure(case, setting)
                yield from case_rows(f"{benchmark}{suffix}", case, samples, setting)
                add_samples(of_net[benchmark], samples, case.layers)
        if net is not None:
            for benchmark, samples in of_net.items():
                yield from case_rows(benchmark, net, samples, setting)


def add_samples(sums: dict[str, Samples], samples: dict[str, Samples], times: int) -> None:
    """Add ``times`` the samples to the sums, round by round."""
    for quantity, by_variant in samples.items():
        of_quantity = sums.setdefault(quantity, {})
        for variant, values in by_variant.items():
            so_far = of_quantity.get(variant, [0.0] * len(values))
            of_quantity[variant] = [a + times * b for a, b in zip(so_far, values, strict=True)]


def launch_rows(setting: Setting) -> Iterator[Row]:
    """Count launches and waits of a layer and its collectives.

    Raises:
        RuntimeError: The profiler saw no kernels.
    """
    turns = make_buffers(OVERHEAD, setting.device)
    layers = make_layers(OVERHEAD, setting)
    for variant, quantity in itertools.product(("syncbn", "torch"), LAYER):
        call = step_call(layers[variant], turns, quantity=quantity)
        for _ in range(3):  # ranks wait when the order of passes changes
            call()
        launches = record_launches(call)
        if not launches.kernels:
            raise RuntimeError(f"expected kernels of {variant} in the trace, but got none")
        inputs = (*OVERHEAD.columns, setting.threads, setting.allocator)
        for kind, names in launches._asdict().items():
            row = (*inputs, f"{quantity}, {kind}", variant, "counted")
            yield Row("launches", *row, *spread([len(names)]), "calls", 1)


def setting_rows(setting: Setting) -> Iterator[Row]:
    """Measure everything of one rank."""
    yield from overhead_rows(setting, launch_clock, LAYER)
    yield from launch_rows(setting)
    yield from timing_rows(setting, IN_A_GROUP)
    yield from fused_rows(setting)


def main(path: str, suite_name: str) -> None:
    """Append the rows to the file."""
    torch.cuda.set_device(0)
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    suite = CUDA_SUITES[suite_name]
    # torch's allocator reuses memory; the host's threads are idle.
    clocks = (eager_clock, gpu_clock)
    setting = Setting(suite, CUDA, 1, "tuned", *clocks, num_buffers, make_theirs, their_operators)
    with group_of_one():
        write(Path(path), stamp(setting_rows(setting), "cuda"))
    write(Path(path), stamp(timing_rows(setting, IN_ONE_PROCESS), "cuda"))
    dist.destroy_process_group()
    worlds = [n for n in suite.worlds if n <= torch.cuda.device_count()]
    if worlds:
        write(Path(path), stamp(collective_rows(worlds, "nccl", "cuda"), "cuda"))


if __name__ == "__main__":
    main(*sys.argv[1:])
