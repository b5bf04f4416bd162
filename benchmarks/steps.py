"""Whole training steps of ResNets: ``python -m benchmarks steps``.

The nets have the layers and shapes of He et al., "Deep Residual Learning for Image Recognition"
(2015). A step is a forward pass, a cross-entropy, a backward pass and SGD. All variants take turns
in each round. On a GPU: bfloat16 autocast, channels_last, and a group of one rank that still runs
its collectives. On CPUs: float32, and two ranks over gloo, with one thread each.
"""

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from benchmarks.results import Row, Spread, device_slug, spread, stamp, write
from syncbn import convert_sync_batchnorm
from syncbn._compat import count_operations


class Block(nn.Module):
    """Convolutions of these widths and kernels, each normalized, and a sum with the input."""

    def __init__(self, inputs: int, convolutions: list[tuple[int, int]], stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width, strided = inputs, max(range(len(convolutions)), key=lambda i: convolutions[i][1])
        for number, (outputs, kernel) in enumerate(convolutions):
            step = stride if number == strided else 1
            layers += normalized(width, outputs, kernel, step)
            layers += [nn.ReLU()] if number < len(convolutions) - 1 else []
            width = outputs
        self.body = nn.Sequential(*layers)
        needs_shortcut = stride != 1 or inputs != width
        self.shortcut = nn.Sequential(
            *(normalized(inputs, width, 1, stride) if needs_shortcut else [])
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated sum."""
        return F.relu(self.body(x) + self.shortcut(x))


def normalized(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    """Return a convolution and its normalization."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet(depth: int) -> nn.Module:
    """Return a ResNet-18 or ResNet-50."""
    numbers = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]
    layers: list[nn.Module] = [*normalized(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, number in enumerate(numbers):
        width = 64 << stage
        basic, bottleneck = [(width, 3), (width, 3)], [(width, 1), (width, 3), (4 * width, 1)]
        convolutions = basic if depth == 18 else bottleneck
        for block in range(number):
            layers.append(Block(inputs, convolutions, 2 if stage > 0 and block == 0 else 1))
            inputs = convolutions[-1][0]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return nn.Sequential(*layers)


class Case(NamedTuple):
    """A net and its input."""

    depth: int
    images: int
    pixels: int

    def __str__(self) -> str:
        return f"ResNet-{self.depth}, {self.images} images of {self.pixels}x{self.pixels}"


CASES = {
    "cuda": [Case(depth, images, 224) for depth in (18, 50) for images in (16, 32, 256)],
    "cpu": [Case(18, 4, 64), Case(18, 16, 112)],
}
TINY = Case(18, 2, 32)
MODES = {"cuda": ("eager", "compiled", "reduce-overhead"), "cpu": ("eager", "compiled")}


class Measured(NamedTuple):
    """A variant's step in one mode, and the collectives that were counted."""

    variant: str
    mode: str
    milliseconds: Spread
    host_milliseconds: Spread
    mebibytes: float  # the peak of memory on a GPU; NaN on a CPU
    collectives: int

    def rows(self, case: Case, device: torch.device, rounds: int) -> Iterator[Row]:
        """Yield the rows of results."""
        on_gpu = device.type == "cuda"
        peak, sent = spread([self.mebibytes]), spread([self.collectives])
        for quantity, found, unit in (
            ("step", self.milliseconds, "ms"),
            ("host", self.host_milliseconds, "ms"),
            ("peak of memory", peak, "MiB"),
            ("collectives", sent, "calls"),
        ):
            if on_gpu or quantity in ("step", "collectives"):
                yield Row(
                    benchmark=f"steps, {self.mode}",
                    case=f"ResNet-{case.depth}",
                    dtype="bfloat16" if on_gpu else "float32",
                    layout="channels_last" if on_gpu else "contiguous",
                    shape=f"{case.images}x3x{case.pixels}x{case.pixels}",
                    threads=torch.get_num_threads(),
                    allocator="default",
                    quantity=quantity,
                    variant=self.variant,
                    kind="counted" if unit == "calls" else "measured",
                    median=found.median,
                    q1=found.q1,
                    q3=found.q3,
                    unit=unit,
                    repeats=rounds,
                )


class Step:
    """A training step of a variant, in the context that its layers need."""

    def __init__(self, variant: str, mode: str, case: Case, device: torch.device) -> None:
        self.variant, self.mode, self.device = variant, mode, device
        torch.manual_seed(0)
        model = resnet(case.depth)
        self.context: Callable[[], Any] = contextlib.nullcontext
        if variant == "syncbn, group":
            convert_sync_batchnorm(model)
            self.context = group_of_one if device.type == "cuda" else contextlib.nullcontext
        elif variant == "syncbn, one process":
            convert_sync_batchnorm(model, group_size=1)
        elif variant == "torch's SyncBatchNorm, group":
            use_torchs(model)
        layout: Any = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.model = model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.run: Any = self.model
        if mode != "eager":
            named: Any = mode if mode == "reduce-overhead" else None
            self.run = torch.compile(self.model, mode=named)
        shape = (case.images, 3, case.pixels, case.pixels)
        self.x = torch.randn(shape, device=device).to(memory_format=layout)
        self.labels = torch.randint(1000, (case.images,), device=device)

    def __call__(self) -> None:
        """Train one step."""
        with self.context():
            if self.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = F.cross_entropy(self.run(self.x), self.labels)
            loss.backward()
            self.optimizer.step()

    def clock(self) -> tuple[float, float]:
        """Return the milliseconds of a step, and until its host is done."""
        self.wait()
        start = time.perf_counter()
        self()
        host = time.perf_counter() - start
        self.wait()
        return (time.perf_counter() - start) * 1e3, host * 1e3

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak(self) -> float:
        """Return the peak of memory of a step in MiB; NaN on a CPU."""
        if self.device.type != "cuda":
            return float("nan")
        torch.cuda.reset_peak_memory_stats()
        self()
        return torch.cuda.max_memory_allocated() / 2**20

    def collectives(self) -> int:
        """Return the number of collectives of a step."""
        group = dist.group.WORLD
        assert group is not None
        before = count_operations(group, self.device)
        self()
        return count_operations(group, self.device) - before


def group_of_one() -> Any:
    """Return a context in which our layers run collectives in a group of one rank."""
    from benchmarks import cuda

    return cuda.group_of_one()


def use_torchs(model: nn.Module) -> None:
    """Replace BatchNorm2d by torch's layer, which here also synchronizes in a group of one."""
    from benchmarks.cuda import TorchLayer

    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = TorchLayer  # type: ignore[assignment]
            module.process_group = None  # type: ignore[assignment]


def measure(case: Case, modes: Sequence[str], device: torch.device, rounds: int) -> list[Measured]:
    """Measure all variants on one rank.

    Raises:
        RuntimeError: A variant ran another number of collectives than expected.
    """
    variants = ["BatchNorm2d", "syncbn, one process", "syncbn, group"]
    if device.type == "cuda":  # on CPUs torch's layer does not train
        variants.append("torch's SyncBatchNorm, group")
    found = []
    for mode in modes:
        steps = [Step(variant, mode, case, device) for variant in variants]
        if mode == "reduce-overhead":  # torch's layer waits for the device: no graph can hold that
            steps = steps[:3]
        for step in steps * 4:  # compile, record and warm up
            step()
        times: list[list[tuple[float, float]]] = [[] for _ in steps]
        for _ in range(rounds):
            for step, of_step in zip(steps, times, strict=True):
                of_step.append(step.clock())
        for step, of_step in zip(steps, times, strict=True):
            whole, host = (spread(column) for column in zip(*of_step, strict=True))
            sent, layers = step.collectives(), count_layers(step.model)
            is_replayed = mode == "reduce-overhead"  # the backend counts no replay
            expected = 2 * layers if step.variant == "syncbn, group" and not is_replayed else None
            if step.variant in variants[:2]:
                expected = 0
            if expected is not None and sent != expected:
                raise RuntimeError(
                    f"{step.variant}, {mode}: expected {expected} collectives in a step, but "
                    f"counted {sent}"
                )
            found.append(Measured(step.variant, mode, whole, host, step.peak(), sent))
    return found


def count_layers(model: nn.Module) -> int:
    """Return the number of batch normalization layers."""
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def run_rank(rank: int, device_type: str, store: str, rounds: int, tiny: bool, output: str) -> None:
    """Measure on one rank; the first one prints a table for each case, and writes a CSV."""
    device, world = torch.device(device_type), 1 if device_type == "cuda" else 2
    if device_type == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device_type == "cuda" else "gloo"
    url = f"file://{store}"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=world)
    rows: list[Row] = []
    modes = MODES[device_type][: 1 if tiny else None]  # a compilation takes a minute
    for case in [TINY] if tiny else CASES[device_type]:
        measured = measure(case, modes, device, rounds)
        rows += [row for found in measured for row in found.rows(case, device, rounds)]
        if rank == 0:
            print_table(case, measured)
    if rank == 0 and output:
        path = Path(output) / f"steps-{device_slug(device_type)}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        write(path, stamp(rows, device_type))
        print(path)
    dist.destroy_process_group()


def print_table(case: Case, measured: list[Measured]) -> None:
    """Print milliseconds of a step; on a GPU also of the host, in brackets, and peaks of memory."""
    modes = list(dict.fromkeys(m.mode for m in measured))
    print(f"\n{case}, torch {torch.__version__}\n")
    is_on_gpu = not math.isnan(measured[0].mebibytes)
    names = "ms (of the host), MiB, collectives" if is_on_gpu else "ms, collectives"
    print("| layer |", *(f"{mode}: {names} |" for mode in modes))
    print("|---|" + "---|" * len(modes))
    for variant in dict.fromkeys(m.variant for m in measured):
        by_mode = {m.mode: m for m in measured if m.variant == variant}
        cells = []
        for mode in modes:
            cell, m = "not measured", by_mode.get(mode)
            if m is not None:
                host = f" ({m.host_milliseconds.median:.1f}), {m.mebibytes:.0f}"
                cell = f"{m.milliseconds.median:.1f}{host if is_on_gpu else ''}, {m.collectives}"
            cells.append(cell)
        print(f"| {variant} |", " | ".join(cells), "|", flush=True)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("python -m benchmarks steps: torch sees no CUDA device")
    with tempfile.TemporaryDirectory() as folder:
        output = "" if args.output is None else str(args.output.resolve())
        rest = (args.device, f"{folder}/store", args.rounds, args.tiny, output)
        if args.device == "cuda":
            run_rank(0, *rest)
        else:
            spawn(run_rank, rest, nprocs=2)
