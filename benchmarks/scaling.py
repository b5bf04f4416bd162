"""Counts one layer's messages by world size, and projects their time on many GPUs.

Counts the calls of torch.distributed's collectives, and their input and output bytes on one rank.
The bytes on a backend's links depend on the backend.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rows import Row
from syncbn import sync_batch_norm

SHAPE = (2, 64, 4, 4)
EPS = 1e-5

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

    Forward an all-gather of mean, invstd and count of each rank, backward an all-reduce; both of
    the parameters' float32.
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


Counts = dict[tuple[int, str, str], int]


def _count(rank: int, worlds: Sequence[int], store: str) -> Counts:
    """Count on one rank of the largest world; runs in a spawned process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=max(worlds),
        timeout=timedelta(seconds=60),  # for the other ranks, if one fails
    )

    def ours(x: Tensor) -> Tensor:
        return sync_batch_norm(x, None, None, training=True, eps=EPS, process_group=group)

    def all_gather(x: Tensor) -> Tensor:
        if group.size() == 1:  # torch's layer does not synchronize there
            output: Tensor = F.batch_norm(x, None, None, training=True, eps=EPS)
        else:
            output = AllGatherBatchNorm.apply(x, group)
        return output

    counts: Counts = {}
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    weights = torch.linspace(-1, 1, x.numel()).view(SHAPE)
    for world in worlds:
        # An int on ranks outside of the group, which skip it.
        group: Any = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        results = {}
        variants: dict[str, Callable[[Tensor], Tensor]]
        variants = {"syncbn": ours, "all-gather": all_gather}
        for variant, layer in variants.items():
            with Wire() as wire:
                y = layer(x)
                (dx,) = torch.autograd.grad(y, x, weights)
            for quantity in ("collectives", "bytes_sent", "bytes_received"):
                counts[world, variant, quantity] = getattr(wire, quantity)
            results[variant] = (y, dx)
        # Both variants compute the same.
        torch.testing.assert_close(results["syncbn"], results["all-gather"], rtol=1e-4, atol=1e-4)
    dist.barrier()
    dist.destroy_process_group()
    return counts


def scaling_rows(worlds: Sequence[int]) -> Iterator[Row]:
    """Yield counts of processes over gloo, and the projections."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            max(worlds), mp_context=multiprocessing.get_context("spawn")
        ) as processes,
    ):
        jobs = [
            processes.submit(_count, rank, worlds, str(Path(folder) / "store"))
            for rank in range(max(worlds))
        ]
        counts = jobs[0].result()
    for (world, variant, quantity), value in counts.items():
        unit = "calls" if quantity == "collectives" else "bytes"
        yield _row(world, variant, quantity, "counted", value, unit)
    for variant, projected in PROJECTED_US.items():
        for world, us in projected.items():
            yield _row(world, variant, "forward collective", "projection", us, "us")


def _row(world: int, variant: str, quantity: str, kind: str, value: float, unit: str) -> Row:
    shape = "x".join(map(str, SHAPE)) if kind == "counted" else ""
    inputs = (f"world {world}", "float32", "contiguous", shape, 1, "default")
    return Row("scaling", *inputs, quantity, variant, kind, value, value, value, unit, 1)
