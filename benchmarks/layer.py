"""Times of the layer, the four operators and a tiny layer, compared with torch and copying.

A pass over memory is one tensor read or written. Fused batch normalization needs at least 3 passes
forward and 5 backward; copying a tensor is 2 passes, so the time of a copy gives the time of these
passes at full bandwidth. On CPUs some cases are faster: an ordinary store also reads the memory
that it overwrites, an uncounted pass; a store past the caches does not.

The layer is the only rank of its group; scaling.py has the cost of communication.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import syncbn
from benchmarks.cases import Case, Suite
from benchmarks.rows import Row, spread
from benchmarks.timer import Call, host_clock, interleave
from syncbn import ops

LAYER_PASSES = {"forward": 3, "forward+backward": 8}
OPERATOR_PASSES = {
    "batch_norm_stats": 1,
    "batch_norm_apply": 2,
    "batch_norm_backward_reduce": 2,
    "batch_norm_backward_apply": 3,
}


# Almost nothing to compute.
OVERHEAD = Case("overhead", (8, 16, 4, 4), "float32", "contiguous")


class Buffers(NamedTuple):
    """The tensors of one call. ``x`` is ``leaf`` without a gradient."""

    x: Tensor
    leaf: Tensor
    dy: Tensor
    out: Tensor


class Setting(NamedTuple):
    """The conditions of a measurement."""

    suite: Suite
    device: torch.device
    threads: int
    allocator: str


def make_buffers(case: Case, device: torch.device, number: int = 1) -> Iterator[Buffers]:
    """Return an endless cycle of ``number`` buffers.

    With one buffer, small tensors stay in the caches, as in a net.
    """
    buffers = []
    for seed in range(number):
        x, dy = case.tensor(device, 2 * seed), case.tensor(device, 2 * seed + 1)
        buffers.append(Buffers(x, x.detach().requires_grad_(), dy, torch.empty_like(x)))
    return itertools.cycle(buffers)


def layer_rows(case: Case, setting: Setting) -> Iterator[Row]:
    """Time forward, and forward with backward: our layer (twice), torch's, and a copy."""
    layers = make_layers(case, setting.device)
    turns = make_buffers(case, setting.device)
    for quantity, passes in LAYER_PASSES.items():
        backward = quantity != "forward"
        variants = {name: step_call(layer, turns, backward) for name, layer in layers.items()}
        variants["copy"] = copy_call(turns)
        samples = time_variants(variants, setting)
        samples["copy"] = [passes / 2 * seconds for seconds in samples["copy"]]
        pairs = [("copy", "syncbn"), ("copy", "torch")]
        yield from timed_rows("layer", case, quantity, samples, setting, pairs)


def overhead_rows(setting: Setting) -> Iterator[Row]:
    """Time the host for a training step of a layer."""
    case = OVERHEAD
    turns = make_buffers(case, setting.device)
    layers = make_layers(case, setting.device)
    variants = {name: step_call(layer, turns, True) for name, layer in layers.items()}
    samples = time_variants(variants, setting)
    yield from timed_rows("overhead", case, "forward+backward", samples, setting, [])


def operator_rows(case: Case, setting: Setting) -> Iterator[Row]:
    """Time each operator, and a copy of as many bytes."""
    turns = make_buffers(case, setting.device)
    calls = operator_calls(case, setting.device, turns)
    samples = time_variants({**calls, "copy": copy_call(turns)}, setting)
    for name, passes in OPERATOR_PASSES.items():
        copy = [passes / 2 * seconds for seconds in samples["copy"]]
        both = {"syncbn": samples[name], "copy": copy}
        yield from timed_rows("operators", case, name, both, setting, [("copy", "syncbn")])


def parameter_dtype(case: Case) -> torch.dtype:
    """Return the dtype of parameters, as in mixed precision: float32 for 16-bit inputs."""
    return torch.float64 if case.dtype == "float64" else torch.float32


def make_layers(case: Case, device: torch.device) -> dict[str, nn.Module]:
    """Return our layer, torch's unsynchronized layer, and a second one of ours."""
    channels = case.shape[1]
    dtype = parameter_dtype(case)
    theirs = nn.BatchNorm2d if len(case.shape) == 4 else nn.BatchNorm1d
    return {
        "syncbn": syncbn.SyncBatchNorm(channels, device=device, dtype=dtype),
        "torch": theirs(channels, device=device, dtype=dtype),
        "syncbn again": syncbn.SyncBatchNorm(channels, device=device, dtype=dtype),
    }


def step_call(layer: nn.Module, turns: Iterator[Buffers], backward: bool) -> Call:
    """Return a training step, or only its forward pass."""
    parameters = list(layer.parameters())

    def forward() -> Tensor:
        output: Tensor = layer(next(turns).leaf)
        return output

    def both() -> tuple[Tensor, ...]:
        buffers = next(turns)
        # backward() would add to the last step's gradients, in additional passes.
        return torch.autograd.grad(layer(buffers.leaf), [buffers.leaf, *parameters], buffers.dy)

    return both if backward else forward


def copy_call(turns: Iterator[Buffers]) -> Call:
    """Return a copy of a tensor into allocated memory."""

    def copy() -> Tensor:
        buffers = next(turns)
        return buffers.out.copy_(buffers.x)

    return copy


def operator_calls(case: Case, device: torch.device, turns: Iterator[Buffers]) -> dict[str, Call]:
    """Return a call of each operator by its name."""
    channels, dtype = case.shape[1], parameter_dtype(case)
    weight, bias, running_mean, running_var = torch.ones(4, channels, dtype=dtype, device=device)
    steps = torch.zeros((), dtype=torch.int64, device=device)
    first = next(turns)
    totals = ops.batch_norm_stats(first.x)
    running = (running_mean, running_var, steps, 0.1, 1e-5)
    _, mean, invstd, count = ops.batch_norm_apply(first.x, totals, weight, bias, *running)
    sums, _, _ = ops.batch_norm_backward_reduce(first.dy, first.x, mean, invstd, dtype, dtype)

    def stats() -> object:
        return ops.batch_norm_stats(next(turns).x)

    def apply() -> object:
        return ops.batch_norm_apply(next(turns).x, totals, weight, bias, *running)

    def reduce() -> object:
        b = next(turns)
        return ops.batch_norm_backward_reduce(b.dy, b.x, mean, invstd, dtype, dtype)

    def backward_apply() -> object:
        b = next(turns)
        return ops.batch_norm_backward_apply(b.dy, b.x, mean, invstd, weight, sums, count)

    return dict(zip(OPERATOR_PASSES, (stats, apply, reduce, backward_apply), strict=True))


def time_variants(variants: dict[str, Call], setting: Setting) -> dict[str, list[float]]:
    """Return the seconds by variant and round."""
    clocks = dict.fromkeys(variants, host_clock)
    return interleave(variants, clocks, setting.suite.repeats, setting.suite.sample_seconds)


def timed_rows(
    benchmark: str,
    case: Case,
    quantity: str,
    samples: dict[str, list[float]],
    setting: Setting,
    pairs: list[tuple[str, str]],
) -> Iterator[Row]:
    """Yield each variant's time in us, and the ratios of ``pairs``, torch and the repetition."""
    against_syncbn = [name for name in ("torch", "syncbn again") if name in samples]
    pairs = [*pairs, *((name, "syncbn") for name in against_syncbn)]
    measured = [
        (name, "us", [1e6 * seconds for seconds in values]) for name, values in samples.items()
    ]
    for a, b in pairs:
        ratios = [x / y for x, y in zip(samples[a], samples[b], strict=True)]
        measured.append((f"{a}/{b}", "ratio", ratios))
    for variant, unit, values in measured:
        yield Row(
            benchmark,
            case.name,
            case.dtype,
            case.layout,
            "x".join(map(str, case.shape)),
            setting.threads,
            setting.allocator,
            quantity,
            variant,
            "measured",
            *spread(values),
            unit,
            len(values),
        )
