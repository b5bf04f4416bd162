"""Host time of a layer on a CPU: ``python -m benchmarks.host {one,fake,gloo} [--compiler NAME]``.

Twenty layers in sequence, on inputs of 8x16x4x4, so small that the kernels take little time. Times
are microseconds per layer of the calling thread: minima and medians of interleaved rounds, and
ratios to torch's BatchNorm2d, which does not synchronize. ``fake`` is one of two ranks over torch's
backend without communication; ``gloo`` is two ranks with real waits.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import syncbn
from benchmarks.measure import Call
from syncbn import training

LAYERS = 20
SHAPE = (8, 16, 4, 4)
BASELINE = "BatchNorm2d"


class Chain(nn.ModuleList):
    """Layers in sequence; with ``adds``, each adds its input to its normalized input."""

    def __init__(self, layer: Callable[[], nn.Module], *, adds: bool = False) -> None:
        super().__init__(layer() for _ in range(LAYERS))
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer."""
        for layer in self:
            x = layer(x, x) if self.adds else layer(x)
        return x


class PythonChain(Chain):
    """A chain whose training passes Python makes, also where there is a library for them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer."""
        with mock.patch.object(training, "library", None):
            return super().forward(x)


def chains() -> dict[str, nn.Module]:
    """Return the models to compare."""
    channels = SHAPE[1]
    return {
        BASELINE: Chain(lambda: nn.BatchNorm2d(channels)),
        "syncbn": Chain(lambda: syncbn.SyncBatchNorm2d(channels)),
        "syncbn, passes in Python": PythonChain(lambda: syncbn.SyncBatchNorm2d(channels)),
        "syncbn, ReLU": Chain(lambda: syncbn.SyncBatchNorm2d(channels, activation="relu")),
        "syncbn, residual and ReLU": Chain(
            lambda: syncbn.SyncBatchNorm2d(channels, activation="relu"), adds=True
        ),
    }


def step_calls(model: nn.Module, compiler: str) -> tuple[Call, Call]:
    """Return the two halves of a training step, forward and backward."""
    run: Any = torch.compile(model, backend=compiler) if compiler else model
    x, grad = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    leaves, outputs = [x, *model.parameters()], [x]

    def forward() -> None:
        outputs[:] = [run(x)]

    def backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs[0].backward(grad)

    return forward, backward


def run_rank(rank: int, mode: str, store: str, rounds: int, compiler: str) -> None:
    """Measure on one rank, and print on the first."""
    torch.set_num_threads(1)
    if mode == "gloo":
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    elif mode == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    steps = {
        name: step_calls(model, compiler)
        for name, model in chains().items()
        if not (compiler and isinstance(model, PythonChain))  # a graph calls no forward
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds + 5):
        for name, (forward, backward) in steps.items():
            start = time.thread_time()
            forward()
            middle = time.thread_time()
            backward()
            end = time.thread_time()
            if number >= 5:  # the first rounds compile and warm up
                times[name].append((middle - start, end - middle))
    if rank == 0:
        report(mode, times)
    if dist.is_initialized():
        dist.destroy_process_group()


def report(mode: str, times: dict[str, list[tuple[float, float]]]) -> None:
    """Print minima and medians, with ratios to the baseline's."""
    print(f"{mode}, torch {torch.__version__}: microseconds a layer (ratio to {BASELINE})")
    rows = {
        name: [[forward, backward, forward + backward] for forward, backward in found]
        for name, found in times.items()
    }
    for summary in (min, statistics.median):
        base = [summary(column) for column in zip(*rows[BASELINE], strict=True)]
        for name, found in rows.items():
            columns = [summary(column) for column in zip(*found, strict=True)]
            cells = [
                f"{word} {value / LAYERS * 1e6:6.1f} ({value / first:4.2f})"
                for word, value, first in zip(
                    ("forward", "backward", "both"), columns, base, strict=True
                )
            ]
            print(f"  {summary.__name__:6} {name:26}", "  ".join(cells))


def main() -> None:
    """Run one mode, on two ranks if they communicate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("one", "fake", "gloo"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--compiler", default="", help="a backend of torch.compile, as inductor")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rest = (args.mode, f"{folder}/store", args.rounds, args.compiler)
        if args.mode == "gloo":
            spawn(run_rank, rest, nprocs=2)
        else:
            run_rank(0, *rest)


if __name__ == "__main__":
    main()
