"""Host time of ResNet-50's batch norm layers on two ranks: ``python -m benchmarks.cuda_host``.

Only the layers run, on inputs so small that a GPU waits for its host; the clock stops before the
host waits for the device. Times are microseconds per layer, as medians and quartiles of interleaved
rounds: CPU time of all the process's threads, and wall time. Counts are per layer. Each prefix of a
pass in Python has one step more than the last: the differences are the steps' times. The parts show
the cost of CUDA itself, which differs on the stand-in of tests/standin. On the stand-in set
STANDIN_KERNELS=skip STANDIN_STREAMS=late STANDIN_DELAY_MS=20000.
"""

import argparse
import contextlib
import ctypes
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import syncbn
from benchmarks import measure
from benchmarks.measure import Call
from benchmarks.results import spread
from benchmarks.traffic import RESNET50
from syncbn import ops, training
from syncbn.distributed.state import record_of
from syncbn.distributed.sums import all_reduce
from syncbn.ops.arguments import Arguments

CHANNELS = [channels for layers, channels, _ in RESNET50 for _ in range(layers)]
KINDS: dict[str, Callable[..., nn.Module]] = {
    "syncbn": syncbn.SyncBatchNorm,
    "syncbn, passes in Python": syncbn.SyncBatchNorm,
    "torch": nn.SyncBatchNorm,
    "torch without waits": nn.SyncBatchNorm,
    "unsynchronized": nn.BatchNorm2d,
}
Key = tuple[str, str]  # the name of a kind or part, and "forward", "backward" or "part"


class Layers(nn.ModuleList):
    """Independent layers, so that nothing else runs between them."""

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return each layer's output for its input."""
        return [layer(x) for layer, x in zip(self, inputs, strict=True)]


def step_calls(kind: str, layers: int, compiler: str) -> dict[Key, Call]:
    """Return the two halves of a training step, forward and backward."""
    net = Layers(KINDS[kind](c) for c in CHANNELS[:layers]).cuda()
    run: Any = torch.compile(net, backend=compiler) if compiler else net
    shapes = [(2, c, 2, 2) for c in CHANNELS[:layers]]
    inputs = [torch.randn(shape, device="cuda").requires_grad_() for shape in shapes]
    leaves, grads = [*inputs, *net.parameters()], [torch.ones_like(x) for x in inputs]
    outputs: list[Tensor] = []
    contexts: dict[str, Any] = {
        "syncbn, passes in Python": mock.patch.object(training, "library", None),
        # In a capture torch's layer skips its waits.
        "torch without waits": mock.patch.object(
            torch.cuda, "is_current_stream_capturing", lambda: True
        ),
    }
    context = contexts.get(kind, contextlib.nullcontext())

    def forward() -> None:
        with context:
            outputs[:] = run(inputs)

    def backward() -> None:
        torch.autograd.grad(outputs, leaves, grads)

    return {(kind, "forward"): forward, (kind, "backward"): backward}


class PassPrefixes:
    """Prefixes of a layer's passes in Python, each up to one step."""

    def __init__(self, channels: int) -> None:
        self.layer = syncbn.SyncBatchNorm(channels).cuda()
        self.x = torch.randn((2, channels, 2, 2), device="cuda")
        values: list[Any] = [*self.layer.parameters(), *self.layer.buffers(), 0.1, 1e-5, channels]
        self.arguments = Arguments(*values)
        identity = self.layer._syncbn.identity
        self.record = record_of(None, identity, "forward")
        assert self.record.state is not None
        self.backward_record = self.record.state.record(identity, "backward")
        self.saved = training.normalize(self.x, self.sums(), self.arguments, self.record)[1:]

    def statistics(self) -> Tensor:
        """Compute the message of a forward pass."""
        return ops.usual.batch_norm_stats(self.x, self.record.tail, *self.arguments[:6])

    def sums(self) -> Tensor:
        """Sum that message over the ranks."""
        return all_reduce(self.statistics(), self.record)

    def normalized(self) -> object:
        """Normalize by the sums."""
        return training.normalize(self.x, self.sums(), self.arguments, self.record)

    def trained(self) -> object:
        """Run a whole forward pass without a gradient."""
        with mock.patch.object(training, "library", None):
            return training.train(self.x, self.arguments, self.record)

    def reduced(self) -> Tensor:
        """Compute the message of a backward pass."""
        mean, invstd, _ = self.saved
        dtypes = (torch.float32, torch.float32)
        return ops.usual.batch_norm_backward_reduce(
            self.x, self.x, mean, invstd, *dtypes, self.backward_record.tail
        )[0]

    def backward_sums(self) -> Tensor:
        """Sum that message over the ranks."""
        return all_reduce(self.reduced(), self.backward_record)

    def backward_applied(self) -> object:
        """Compute the gradient of the input."""
        sums, state = self.backward_sums(), self.backward_record.state
        assert state is not None
        mean, invstd, count = self.saved
        operands = (mean, invstd, self.arguments.weight, sums, count)
        expectation = state.expectation(self.backward_record, sums)
        return ops.usual.batch_norm_backward_apply(self.x, self.x, *operands, *expectation)


def part_calls(layers: int) -> dict[Key, Call]:
    """Return prefixes of passes, and the CUDA calls of a layer, on eight numbers.

    Each is repeated once per layer.
    """
    passes = [PassPrefixes(channels) for channels in CHANNELS[:layers]]
    x, cpu, event = torch.ones(8, device="cuda"), torch.ones(8), torch.cuda.Event()
    parts: dict[str, Call] = {
        "an allocation": lambda: torch.empty_like(x),
        "an operator of torch": lambda: x.add_(1),
        "the same on the CPU": lambda: cpu.add_(1),
        "an all_reduce": lambda: dist.all_reduce(x),
        "an event": lambda: event.record(),
        "a query of the event": lambda: event.query(),
    }
    calls: dict[Key, Call] = {
        ("statistics", "forward"): lambda: [p.statistics() for p in passes],
        ("+ all-reduce", "forward"): lambda: [p.sums() for p in passes],
        ("+ normalization", "forward"): lambda: [p.normalized() for p in passes],
        ("+ checks and Function", "forward"): lambda: [p.trained() for p in passes],
        ("reduction", "backward"): lambda: [p.reduced() for p in passes],
        ("+ all-reduce", "backward"): lambda: [p.backward_sums() for p in passes],
        ("+ input gradient", "backward"): lambda: [p.backward_applied() for p in passes],
    }
    return calls | {(name, "part"): repeat(part, layers) for name, part in parts.items()}


def repeat(call: Call, times: int) -> Call:
    """Return several calls as one."""
    return lambda: [call() for _ in range(times)]


def clock(call: Call) -> tuple[float, float]:
    """Return a call's CPU and wall seconds, then wait for the device."""
    torch.cuda.synchronize()
    process, wall = time.process_time(), time.perf_counter()
    call()
    times = time.process_time() - process, time.perf_counter() - wall
    torch.cuda.synchronize()
    return times


def count(call: Call) -> dict[str, int]:
    """Return a call's numbers of launches, waits, allocated tensors and collectives."""
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    kernels, copies, waits = measure.record_launches(call)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    collectives = sum(name.startswith("nccl") for name in kernels)
    launched = len(kernels) + len(copies) - collectives
    return dict(launches=launched, waits=len(waits), tensors=allocated, collectives=collectives)


def run_rank(rank: int, store: str, layers: int, rounds: int, compiler: str) -> None:
    """Measure on one rank, and print on the first; runs in a spawned process."""
    if hasattr(ctypes.CDLL(None), "standin_take_log"):  # no profiler sees the stand-in's launches
        importlib.import_module("standin_plugin").count_by_log()
    if torch.cuda.device_count() == 1:  # NCCL lets two ranks share it if their hosts differ
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1")
    torch.set_num_threads(1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    steps = {k: call for kind in KINDS for k, call in step_calls(kind, layers, compiler).items()}
    for call in [*steps.values()] * 3:
        call()
    counts = {key: count(call) for key, call in steps.items()}
    calls = {**steps, **part_calls(layers)}
    samples: dict[Key, list[tuple[float, float]]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            samples[key].append(clock(call))
    if rank == 0:
        print(*table(samples, counts, layers), sep="\n", flush=True)
    dist.destroy_process_group()


def table(samples: Any, counts: Any, layers: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'':36}{'process':28}wall"
    for key, times in samples.items():
        spreads = [spread([1e6 * s / layers for s in c]) for c in zip(*times, strict=True)]
        cells = (f"{s.median:.1f} ({s.q1:.1f} to {s.q3:.1f})" for s in spreads)
        found = (f"{number / layers:g} {what}" for what, number in counts.get(key, {}).items())
        yield "{:26}{:10}{:28}{:28}".format(*key, *cells) + ", ".join(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_host")
    parser.add_argument("--layers", type=int, default=len(CHANNELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiler", default="", help="such as aot_eager; eager without it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (f"{folder}/store", args.layers, args.rounds, args.compiler), nprocs=2)
