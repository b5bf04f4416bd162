"""Collectives of a layer by world size: their number and bytes, and their times.

Counts are of the calls of torch.distributed's collectives, with their input and output bytes on one
rank; the bytes on a backend's links depend on the backend. Each rank of the times has a GPU or a
process.
"""

import functools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import Call, Samples, host_clock, interleave
from benchmarks.results import Row, spread
from syncbn import sync_batch_norm

SHAPE = (2, 64, 4, 4)  # of the counted layer's input
EPS = 1e-5
QUANTITIES = ("collectives", "bytes_sent", "bytes_received")
FORWARD = "forward collective"

# For timing.
CHANNELS = (64, 256, 2048)
ROUNDS = 15
CALLS = 100  # in a row, the same number on all ranks

# Microseconds of a layer's forward collective, modeled with NCCL's tuning constants for 8 GPUs per
# node. These are not measurements: real times are about 1.6 times as long.
PROJECTED_US = {
    "syncbn": {8: 15.0, 64: 45.0, 1024: 85.0, 4096: 105.0},
    "all-gather": {8: 11.0, 64: 82.0, 1024: 1246.0, 4096: 4970.0},
}


class Wire(TorchDispatchMode):
    """Counts collectives, and this rank's input and output bytes."""

    # For each collective, the index of the sent and of the received argument.
    ARGUMENTS = {  # noqa: RUF012 - read only
        "c10d::allreduce_": (0, 0),
        "c10d::allgather_": (1, 0),
        "c10d::_allgather_base_": (1, 0),
        "_c10d_functional::all_reduce": (0, 0),  # the result has the argument's size
    }

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.bytes_sent = self.bytes_received = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count ``func`` if it is a collective, and run it."""
        is_wait = func._schema.name == "_c10d_functional::wait_tensor"
        if func.namespace in ("c10d", "_c10d_functional") and not is_wait:
            # A KeyError means an unknown collective.
            sent, received = self.ARGUMENTS[func._schema.name]
            self.collectives += 1
            self.bytes_sent += _num_bytes(args[sent])
            self.bytes_received += _num_bytes(args[received])
        return func(*args, **(kwargs or {}))


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(_num_bytes(tensor) for tensor in tensors)


class AllGatherBatchNorm(torch.autograd.Function):
    """The messages of torch.nn.SyncBatchNorm, which runs on GPUs only, in plain PyTorch.

    Forward: an all-gather of each rank's mean, invstd and count. Backward: an all-reduce. Both in
    float32, the parameters' dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Normalize (N, C, H, W) by the statistics of the group, without weight and bias."""
        channels, dims = x.size(1), (0, 2, 3)
        invstd = (x.var(dims, correction=0) + EPS).rsqrt()
        own = torch.cat([x.mean(dims), invstd, x.new_full((1,), x.numel() / channels)])
        gathered = own.new_empty(group.size() * own.numel())
        dist.all_gather_into_tensor(gathered, own, group)
        means, invstds, counts = gathered.view(group.size(), -1).split([channels, channels, 1], 1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        squares = invstds**-2 - EPS + (means - mean) ** 2
        invstd = ((squares * counts).sum(0) / count + EPS).rsqrt()
        xhat: Tensor = (x - mean.view(-1, 1, 1)) * invstd.view(-1, 1, 1)
        ctx.save_for_backward(xhat, invstd, count)
        ctx.group = group
        return xhat

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the input."""
        xhat, invstd, count = ctx.saved_tensors
        sums = torch.cat([dy.sum((0, 2, 3)), (dy * xhat).sum((0, 2, 3))])
        dist.all_reduce(sums, group=ctx.group)
        mean_dy, mean_dy_xhat = (sums / count).view(2, -1, 1, 1)
        dx: Tensor = (dy - mean_dy - xhat * mean_dy_xhat) * invstd.view(-1, 1, 1)
        return dx, None


def scaling_rows(worlds: Sequence[int]) -> Iterator[Row]:
    """Yield counts of processes over gloo, and the projections."""
    shape = "x".join(map(str, SHAPE))
    for world, counts in _on_ranks(_count, worlds, "gloo", "cpu").items():
        for variant, quantity, value in counts:
            unit = "calls" if quantity == "collectives" else "bytes"
            yield _row("scaling", world, shape, quantity, variant, "counted", [value], unit)
    for variant, projected in PROJECTED_US.items():
        for world, us in projected.items():
            yield _row("scaling", world, "", FORWARD, variant, "projection", [us], "us")


def collective_rows(worlds: Sequence[int], backend: str, device_type: str) -> Iterator[Row]:
    """Yield the times of rank 0."""
    for world, times in _on_ranks(_time, worlds, backend, device_type).items():
        for channels, samples in times.items():
            for variant, seconds in samples.items():
                us = [1e6 * value for value in seconds]
                case = ("collectives", world, str(channels), FORWARD, variant)
                yield _row(*case, "measured", us, "us")


def _row(
    benchmark: str,
    world: int,
    shape: str,
    quantity: str,
    variant: str,
    kind: str,
    values: Sequence[float],
    unit: str,
) -> Row:
    allocator = "default" if benchmark == "scaling" else "tuned"
    inputs = (f"world {world}", "float32", "contiguous", shape, 1, allocator)
    row = (*inputs, quantity, variant, kind)
    return Row(benchmark, *row, *spread(values), unit, len(values))


Measure = Callable[[Any, torch.device], Any]  # measures one rank of a group


def _on_ranks(
    measure: Measure, worlds: Sequence[int], backend: str, device_type: str
) -> dict[int, Any]:
    """Run ``measure`` in groups of each size; return rank 0's results."""
    ranks = range(max(worlds))
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(len(ranks), mp_context=context) as processes,
    ):
        options = (measure, worlds, backend, device_type, f"file://{folder}/store")
        jobs = [processes.submit(_run_rank, rank, *options) for rank in ranks]
        results = [job.result() for job in jobs]
    return results[0]


def _run_rank(
    rank: int, measure: Measure, worlds: Sequence[int], backend: str, device_type: str, url: str
) -> dict[int, Any]:
    torch.set_num_threads(1)
    device = torch.device(f"cuda:{rank}" if device_type == "cuda" else device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=60)  # for the other ranks, if one fails
    dist.init_process_group(
        backend, init_method=url, rank=rank, world_size=max(worlds), timeout=timeout
    )
    results = {}
    for world in worlds:
        group = dist.new_group(list(range(world)))
        if rank < world:
            results[world] = measure(group, device)
    dist.barrier()
    dist.destroy_process_group()
    return results


def _count(group: dist.ProcessGroup, device: torch.device) -> list[tuple[str, str, int]]:
    """Return the counts of a training step, and check that both variants compute the same."""

    def ours(x: Tensor) -> Tensor:
        return sync_batch_norm(x, None, None, training=True, eps=EPS, process_group=group)

    def all_gather(x: Tensor) -> Tensor:
        if group.size() == 1:  # torch's layer does not synchronize there
            output: Tensor = F.batch_norm(x, None, None, training=True, eps=EPS)
        else:
            output = AllGatherBatchNorm.apply(x, group)
        return output

    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(group.rank())).requires_grad_()
    weights = torch.linspace(-1, 1, x.numel()).view(SHAPE)
    counts, results = [], []
    for variant, layer in {"syncbn": ours, "all-gather": all_gather}.items():
        with Wire() as wire:
            y = layer(x)
            results.append((y, *torch.autograd.grad(y, x, weights)))
        counts += [(variant, quantity, getattr(wire, quantity)) for quantity in QUANTITIES]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    return counts


def _time(group: dist.ProcessGroup, device: torch.device) -> dict[int, Samples]:
    """Time our collective and torch.nn.SyncBatchNorm's; return the samples by channels."""
    clock = functools.partial(_seconds, device)
    samples = {}
    for channels in CHANNELS:
        calls = _calls(channels, device, group)
        samples[channels] = interleave(calls, dict.fromkeys(calls, clock), ROUNDS, 0.0)
    return samples


def _calls(channels: int, device: torch.device, group: dist.ProcessGroup) -> dict[str, Call]:
    size = 2 * channels + 1
    sums = torch.zeros(2 * channels + 4, dtype=torch.float64, device=device)
    own = torch.zeros(size, device=device)
    gathered = torch.zeros(group.size() * size, device=device)
    return {
        "syncbn": lambda: dist.all_reduce(sums, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(gathered, own, group=group),
    }


def _seconds(device: torch.device, call: Call, calls: int) -> float:
    """Return the time of one call, averaged over ``CALLS * calls``, with the device's work."""

    def all_calls() -> None:
        for _ in range(CALLS * calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return host_clock(all_calls, 1) / (CALLS * calls)
