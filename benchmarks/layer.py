"""Times of a layer, its operators and its fused epilogues, compared with torch and copying.

A pass over memory is one tensor read or written. Fused batch normalization needs at least 3 passes
forward and 5 backward; copying a tensor is 2 passes, so the time of a copy gives the time of these
passes at full bandwidth. On CPUs some cases are faster: an ordinary store also reads the memory
that it overwrites, an uncounted pass; a store past the caches does not.

Among the fused layers, ``separate`` is our layer, an in-place addition and torch's in-place
activation, as in most nets; ``torch`` is the same after torch's layer. A fused activation needs no
pass over memory.

The layer is the only rank of its group; collectives.py has the cost of communication.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import syncbn
from benchmarks.cases import Case, Suite
from benchmarks.measure import Call, Clock, Samples, host_clock, interleave
from benchmarks.results import STEP, Row, spread
from benchmarks.traffic import OPERATORS, PASSES
from syncbn import ops

LAYER = tuple(PASSES)[:2]
ADDITION_PASSES = 3  # one read forward, one read and one write backward
ACTIVATIONS = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "silu": nn.SiLU}

# Almost nothing to compute.
OVERHEAD = Case("overhead", (8, 16, 4, 4), "float32", "contiguous")


class Buffers(NamedTuple):
    """The tensors of one call. ``x`` is ``leaf`` without a gradient."""

    x: Tensor
    leaf: Tensor
    dy: Tensor
    out: Tensor


def norm_options(case: Case, device: torch.device) -> dict[str, Any]:
    """Return parameters' device and dtype: as in mixed precision, float32 for 16-bit inputs."""
    return {"device": device, "dtype": torch.float64 if case.dtype == "float64" else torch.float32}


def unsynchronized(case: Case, device: torch.device) -> nn.Module:
    """Return torch's BatchNorm."""
    theirs = nn.BatchNorm2d if len(case.shape) == 4 else nn.BatchNorm1d
    return theirs(case.shape[1], **norm_options(case, device))


class Setting(NamedTuple):
    """The conditions of a measurement; the defaults are a CPU's."""

    suite: Suite
    device: torch.device
    threads: int
    allocator: str
    layer_clock: Clock = host_clock
    kernel_clock: Clock = host_clock  # of operators and copies
    # Buffers per case: with one, small tensors stay in the caches, as in a net.
    num_buffers: Callable[[Case], int] = lambda case: 1
    make_theirs: Callable[[Case, torch.device], nn.Module] = unsynchronized
    # Torch's kernels for each of OPERATORS, if it has any.
    their_operators: Callable[[Case, torch.device, Iterator[Buffers]], list[Call]] | None = None


def make_layers(case: Case, setting: Setting) -> dict[str, nn.Module]:
    """Return our layer, torch's, and a second one of ours."""

    def ours() -> nn.Module:
        return syncbn.SyncBatchNorm(case.shape[1], **norm_options(case, setting.device))

    theirs = setting.make_theirs(case, setting.device)
    return {"syncbn": ours(), "torch": theirs, "syncbn again": ours()}


def make_buffers(case: Case, device: torch.device, number: int = 1) -> Iterator[Buffers]:
    """Return an endless cycle of ``number`` buffers."""
    buffers = []
    for seed in range(number):
        x, dy = case.tensor(device, 2 * seed), case.tensor(device, 2 * seed + 1)
        buffers.append(Buffers(x, x.detach().requires_grad_(), dy, torch.empty_like(x)))
    return itertools.cycle(buffers)


def step_call(
    layer: nn.Module, turns: Iterator[Buffers], *residuals: Tensor, quantity: str = STEP
) -> Call:
    """Return a training step, or only its forward pass."""
    parameters = list(layer.parameters())

    def forward() -> Tensor:
        output: Tensor = layer(next(turns).leaf)
        return output

    def both() -> tuple[Tensor, ...]:
        buffers = next(turns)
        inputs = [buffers.leaf, *residuals]
        # backward() would add to the last step's gradients, in additional passes.
        return torch.autograd.grad(layer(*inputs), [*inputs, *parameters], buffers.dy)

    return both if quantity == STEP else forward


def operator_calls(case: Case, device: torch.device, turns: Iterator[Buffers]) -> list[Call]:
    """Return a call of each operator."""
    channels, dtype = case.shape[1], norm_options(case, device)["dtype"]
    weight, bias, running_mean, running_var = torch.ones(4, channels, dtype=dtype, device=device)
    steps = torch.zeros((), dtype=torch.int64, device=device)
    first = next(turns)
    totals = ops.usual.batch_norm_stats(first.x)
    running = (running_mean, running_var, steps, 0.1, 1e-5)
    _, mean, invstd, count = ops.usual.batch_norm_apply(first.x, totals, weight, bias, *running)
    sums, _, _ = ops.usual.batch_norm_backward_reduce(first.dy, first.x, mean, invstd, dtype, dtype)

    def stats() -> object:
        return ops.usual.batch_norm_stats(next(turns).x)

    def apply() -> object:
        return ops.usual.batch_norm_apply(next(turns).x, totals, weight, bias, *running)

    def reduce() -> object:
        b = next(turns)
        return ops.usual.batch_norm_backward_reduce(b.dy, b.x, mean, invstd, dtype, dtype)

    def backward_apply() -> object:
        b = next(turns)
        return ops.usual.batch_norm_backward_apply(b.dy, b.x, mean, invstd, weight, sums, count)

    return [stats, apply, reduce, backward_apply]


def keep_results(call: Call, number: int) -> Call:
    """Return a call that keeps its last results, so that the next ones use other memory."""
    kept: deque[object] = deque(maxlen=number)
    return lambda: kept.append(call())


def time_beside_copy(
    calls: dict[str, Call], turns: Iterator[Buffers], clock: Clock, setting: Setting, number: int
) -> Samples:
    """Time calls by a clock, and a copy of a tensor into allocated memory."""

    def copy() -> Tensor:
        buffers = next(turns)
        return buffers.out.copy_(buffers.x)

    clocks = {**dict.fromkeys(calls, clock), "copy": setting.kernel_clock}
    calls = {**calls, "copy": copy}
    if number > 1:
        calls = {name: keep_results(call, number) for name, call in calls.items()}
    return interleave(calls, clocks, setting.suite.repeats, setting.suite.sample_seconds)


def layer_samples(case: Case, setting: Setting) -> dict[str, Samples]:
    """Time forward, and forward with backward: our layer (twice), torch's, and a copy."""
    number = setting.num_buffers(case)
    turns = make_buffers(case, setting.device, number)
    layers = make_layers(case, setting)
    samples = {}
    for quantity in LAYER:
        calls = {n: step_call(layer, turns, quantity=quantity) for n, layer in layers.items()}
        samples[quantity] = time_beside_copy(calls, turns, setting.layer_clock, setting, number)
    return samples


def operator_samples(case: Case, setting: Setting) -> dict[str, Samples]:
    """Time each operator, torch's kernels that do the same, and a copy."""
    number = setting.num_buffers(case)
    turns = make_buffers(case, setting.device, number)
    of_variants = {"syncbn": operator_calls(case, setting.device, turns)}
    if setting.their_operators is not None:
        of_variants["torch"] = setting.their_operators(case, setting.device, turns)
    calls = {
        f"{name}, {variant}": call
        for variant, of_variant in of_variants.items()
        for name, call in zip(OPERATORS, of_variant, strict=True)
    }
    samples = time_beside_copy(calls, turns, setting.kernel_clock, setting, number)
    return {
        name: {v: samples[f"{name}, {v}"] for v in of_variants} | {"copy": samples["copy"]}
        for name in OPERATORS
    }


def kernel_samples(case: Case, setting: Setting) -> dict[str, Samples]:
    """Time the kernels of a layer without synchronization: ours, cuDNN's, torch's own, a copy."""
    number = setting.num_buffers(case)
    turns = make_buffers(case, setting.device, number)
    ours = syncbn.SyncBatchNorm(case.shape[1], **norm_options(case, setting.device))
    theirs = unsynchronized(case, setting.device)
    samples = {}
    for quantity in LAYER:
        with_cudnn = step_call(theirs, turns, quantity=quantity)

        def native(call: Call = with_cudnn) -> object:
            with torch.backends.cudnn.flags(enabled=False):
                return call()

        calls = {"syncbn": step_call(ours, turns, quantity=quantity), "native": native}
        calls["cuDNN"] = with_cudnn
        samples[quantity] = time_beside_copy(calls, turns, setting.kernel_clock, setting, number)
    return samples


def case_rows(
    benchmark: str, case: Case, samples: dict[str, Samples], setting: Setting
) -> Iterator[Row]:
    """Yield the rows of a case."""
    for quantity, of_quantity in samples.items():
        yield from timed_rows(benchmark, case, quantity, of_quantity, setting, PASSES[quantity])


def overhead_rows(setting: Setting, clock: Clock, quantities: Iterable[str]) -> Iterator[Row]:
    """Time the host for a layer with almost nothing to compute."""
    turns = make_buffers(OVERHEAD, setting.device)
    layers = make_layers(OVERHEAD, setting)
    for quantity in quantities:
        calls = {n: step_call(layer, turns, quantity=quantity) for n, layer in layers.items()}
        clocks = dict.fromkeys(calls, clock)
        samples = interleave(calls, clocks, setting.suite.repeats, setting.suite.sample_seconds)
        yield from timed_rows("overhead", OVERHEAD, quantity, samples, setting)


class Separate(nn.Module):
    """A normalization, an addition and an activation as separate modules."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(norm(x) + residual)``."""
        z = self.norm(x)
        if residual is not None:
            z += residual
        output: Tensor = self.activation(z)
        return output


def fused_rows(setting: Setting) -> Iterator[Row]:
    """Time the fused cases with each activation, with and without an addition before it."""
    for case in setting.suite.fused:
        number = setting.num_buffers(case)
        turns = make_buffers(case, setting.device, number)
        addend = case.tensor(setting.device, seed=2).requires_grad_()
        for activation, addends in itertools.product(ACTIVATIONS, ((), (addend,))):
            layers = _fused_layers(case, setting, activation)
            calls = {name: step_call(layer, turns, *addends) for name, layer in layers.items()}
            samples = time_beside_copy(calls, turns, setting.layer_clock, setting, number)
            name = f"{case.name}{' + addition' * len(addends)} + {ACTIVATIONS[activation].__name__}"
            passes = PASSES[STEP] + ADDITION_PASSES * len(addends)
            yield from timed_rows("fused", replace(case, name=name), STEP, samples, setting, passes)


def _fused_layers(case: Case, setting: Setting, activation: str) -> dict[str, nn.Module]:
    """Return the compared layers with an activation."""
    module = ACTIVATIONS[activation]

    def ours(activation: str | None) -> nn.Module:
        options = norm_options(case, setting.device)
        return syncbn.SyncBatchNorm(case.shape[1], activation=activation, **options)

    return {
        "syncbn": ours(activation),
        "separate": Separate(ours(None), module(inplace=True)),
        "torch": Separate(setting.make_theirs(case, setting.device), module(inplace=True)),
        "syncbn again": ours(activation),
    }


def timed_rows(
    benchmark: str,
    case: Case,
    quantity: str,
    samples: Samples,
    setting: Setting,
    passes: int = 0,
) -> Iterator[Row]:
    """Yield each variant's time in us, the time of copying ``passes`` tensors, and the ratios."""
    samples = dict(samples)
    if "copy" in samples:
        samples["copy"] = [passes / 2 * seconds for seconds in samples["copy"]]
    measured: list[tuple[str, str, Sequence[float]]] = [
        (name, "us", [1e6 * seconds for seconds in values]) for name, values in samples.items()
    ]
    pairs = [(name, "syncbn") for name in samples if name != "syncbn"]
    if "copy" in samples and "torch" in samples:
        pairs.append(("copy", "torch"))
    for a, b in pairs:
        ratios = [x / y for x, y in zip(samples[a], samples[b], strict=True)]
        measured.append((f"{a}/{b}", "ratio", ratios))
    inputs = (*case.columns, setting.threads, setting.allocator, quantity)
    for variant, unit, values in measured:
        yield Row(benchmark, *inputs, variant, "measured", *spread(values), unit, len(values))
