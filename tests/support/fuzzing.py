"""Drawn training passes: hypothesis's draws, tensors made of them, and results in float64.

A :class:`Case` is small values only and prints as the code that makes it; ``repeat(Case(...))``
runs it again:

    PYTHONPATH=tests python -c "from support.fuzzing import *; repeat(Case(...))"
"""

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncbn
from support.cases import DTYPES
from support.ranks import Ranks

pytest.importorskip("hypothesis")  # tools.gpu_check needs only torch and pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

# The number of examples of each test, which then differ each time; by default the same few.
EXAMPLES = int(os.environ.get("SYNCBN_FUZZ_EXAMPLES", 0))

MAX_VALUES = 20_000  # of a rank's input
EPS64 = torch.finfo(torch.float64).eps


def fuzz(examples: int, **drawn: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """Run a test with ``examples`` of its ``drawn`` arguments, or as many as are asked for."""
    with_settings = settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        # A rank that fails ends its processes: new ones for each of hundreds of smaller examples.
        phases=set(Phase) - (set() if EXAMPLES else {Phase.shrink}),
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: with_settings(given(**drawn)(test))


class Layout(NamedTuple):
    """Where the values of a tensor lie in memory."""

    order: tuple[int, ...]  # of the dimensions, the fastest last
    steps: tuple[int, ...]  # of each dimension; more than 1 leaves gaps
    expanded: tuple[int, ...]  # dimensions of stride 0
    offset: int


@dataclass(frozen=True)
class Case:
    """Training passes of one layer. Tuples have an entry for each rank of the group."""

    group: tuple[int, ...] | None  # ranks; None is all of them
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[Layout, ...]
    grads: tuple[Layout, ...]
    needs_grad: tuple[bool, ...]
    dtype: torch.dtype
    # Of weight, bias, running_mean and running_var; None is a layer without.
    vectors: tuple[torch.dtype | None, ...]
    vector_stride: int
    momentum: float | None
    eps: float
    mean: float
    std: float
    passes: int
    seed: int

    @property
    def channels(self) -> int:
        return self.shapes[0][1]


def sizes(channels: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of a rank's input."""
    size = st.integers(1, 5) | st.integers(0, 70)
    return (
        st.tuples(size, st.lists(size, max_size=4))
        .map(lambda drawn: (drawn[0], channels, *drawn[1]))
        .filter(lambda shape: math.prod(shape) <= MAX_VALUES)
    )


def layouts(dim: int) -> st.SearchStrategy[Layout]:
    order = st.sampled_from([tuple(range(dim)), (0, *range(2, dim), 1)])
    order |= st.permutations(range(dim)).map(tuple)
    steps = st.just((1,) * dim) | st.tuples(*[st.integers(1, 2)] * dim)
    expanded = st.just(()) | st.lists(st.integers(0, dim - 1), unique=True).map(tuple)
    return st.builds(Layout, order, steps, expanded, st.integers(0, 3))


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    """Draw passes on all ranks, or on two of three."""
    groups = {3: [None, (0, 2), (1, 2)]}.get(world_size, [None])
    group = draw(st.sampled_from(groups))
    members = world_size if group is None else len(group)
    channels = draw(st.integers(1, 9) | st.integers(1, 600))
    shapes = tuple(draw(sizes(channels)) for _ in range(members))
    if sum(map(math.prod, shapes)) == channels:  # one value per channel is an error
        shapes = ((2, channels), *shapes[1:])
    dtype = draw(st.sampled_from(DTYPES))
    vector = st.sampled_from([torch.float32, dtype, torch.float64])
    affine, bias, track = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    kept = [affine, affine and bias, track, track]
    # A rank whose output needs no gradient has no backward pass, in which the others wait for it.
    needs_grad = st.tuples(*[st.booleans() if affine else st.just(True)] * members)
    return Case(
        group=group,
        shapes=shapes,
        inputs=tuple(draw(layouts(len(shape))) for shape in shapes),
        grads=tuple(draw(layouts(len(shape))) for shape in shapes),
        needs_grad=draw(needs_grad),
        dtype=dtype,
        vectors=tuple(draw(vector) if keep else None for keep in kept),
        vector_stride=draw(st.integers(1, 2)),
        momentum=draw(st.sampled_from([0.1, None, 0.0, 1.0, 0.3, 1])),
        eps=draw(st.sampled_from([1e-5, 1e-3, 0.1, 1])),
        mean=draw(st.sampled_from([0.0, 1.0, -30.0, 1000.0])),
        std=draw(st.sampled_from([1.0, 1e-3, 30.0])),
        passes=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**16)),
    )


def lay_out(x: Tensor, layout: Layout) -> Tensor:
    """Return ``x`` at other places, between NaNs; expanded dimensions repeat their first value."""
    for dim in layout.expanded:
        x = x.narrow(dim, 0, min(x.size(dim), 1)).expand(x.shape)
    sizes = [1 if d in layout.expanded else x.size(d) * layout.steps[d] for d in layout.order]
    memory = torch.full((layout.offset + math.prod(sizes),), torch.nan, dtype=x.dtype)
    view = memory[layout.offset :].view(sizes)
    view = view.permute([layout.order.index(d) for d in range(x.dim())])
    for dim in range(x.dim()):
        if dim in layout.expanded:
            view = view.expand([x.size(d) if d == dim else -1 for d in range(x.dim())])
        else:
            view = view[(slice(None),) * dim + (slice(None, None, layout.steps[dim]),)]
    stored = tuple(slice(1) if d in layout.expanded else slice(None) for d in range(x.dim()))
    view[stored].copy_(x[stored])
    return view


def make_batch(case: Case, number: int, member: int) -> tuple[Tensor, Tensor]:
    """Return the input and the gradient of the output of a rank in pass ``number``."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * number + member)
    shape = case.shapes[member]
    x, dy = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    x = (x * case.std + case.mean).to(case.dtype)
    return lay_out(x, case.inputs[member]), lay_out(dy.to(case.dtype), case.grads[member])


def make_vectors(case: Case) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(case.seed)
    values = torch.randn(4, case.channels, dtype=torch.float64, generator=generator)
    values[3].abs_()
    layout = Layout((0,), (case.vector_stride,), (), 0)
    return [
        None if dtype is None else lay_out(v.to(dtype), layout)
        for v, dtype in zip(values, case.vectors, strict=True)
    ]


def make_layer(case: Case, kind: type[nn.Module] = syncbn.SyncBatchNorm, **options) -> nn.Module:
    weight, bias, mean, var = make_vectors(case)
    affine, track = weight is not None, mean is not None
    layer = kind(case.channels, case.eps, case.momentum, affine, track, **options)
    layer.weight = None if weight is None else nn.Parameter(weight)
    layer.bias = None if bias is None else nn.Parameter(bias)
    layer.running_mean, layer.running_var = mean, var
    return layer


class Results(NamedTuple):
    """Of one rank in one pass."""

    output: Tensor
    grad_input: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: int | None


def train(layer: nn.Module, x: Tensor, dy: Tensor, needs_grad: bool = True) -> Results:
    before = x.clone()
    leaf = x.detach().requires_grad_(needs_grad)
    layer.zero_grad()
    y = layer(leaf)
    y.backward(dy)
    assert y.dtype == x.dtype and torch.equal(x, before)
    assert not needs_grad or leaf.grad.dtype == x.dtype
    of_parameters = [None if p is None else p.grad for p in (layer.weight, layer.bias)]
    running = [None if b is None else b.clone() for b in (layer.running_mean, layer.running_var)]
    counter = layer.num_batches_tracked
    tracked = None if counter is None else int(counter)
    return Results(y.detach(), leaf.grad, *of_parameters, *running, tracked)


@functools.cache
def new_group(members: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(members)


def run(rank: int, world_size: int, case: Case) -> list[tuple] | None:
    """Run the passes on a rank."""
    group = None if case.group is None else new_group(case.group)
    if case.group is not None and rank not in case.group:
        return None
    member = rank if case.group is None else case.group.index(rank)
    layer = make_layer(case, process_group=group)
    batches = [make_batch(case, number, member) for number in range(case.passes)]
    # Tuples, because the file that a rank loads this from is no module of the test process.
    return [tuple(train(layer, x, dy, case.needs_grad[member])) for x, dy in batches]


def rows(x: Tensor) -> Tensor:
    """Return the values of each channel in a column, as float64."""
    return x.double().movedim(1, -1).reshape(-1, x.size(1))


def assert_near(name: str, actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """``tolerance`` is of the computation; the rounding to the dtype is added here."""
    dtype = torch.finfo(actual.dtype)
    actual = rows(actual) if actual.dim() > 1 else actual.double()
    # One eps; below the normal numbers the distance between two of them.
    allowed = tolerance + dtype.eps * expected.abs() + dtype.smallest_normal * dtype.eps
    wrong = ~((actual - expected).abs() <= allowed)
    if wrong.any():
        worst = ((actual - expected).abs() / allowed).nan_to_num(nan=math.inf).max().item()
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values are off, by up to {worst:.3g} "
            f"tolerances: {actual[wrong][:3].tolist()} instead of {expected[wrong][:3].tolist()}"
        )


def check(case: Case, results: list[list[Results]]) -> None:
    """Compare all passes of the group's ranks with the whole batch in float64.

    Tolerances are per channel; eps is that of float32, or of float64 with float64 inputs. Sums are
    off by up to 32 eps of their terms' magnitudes (``cases.sum_tolerance``), a formula of a handful
    of operations by 8 eps of its largest term. The message costs the variance up to 4 eps of
    float64 of the mean square, and so do ranks that add up their sums (docs/numerics.md).
    """
    eps = torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps
    weight, bias, *running = [None if v is None else v.double() for v in make_vectors(case)]
    weight = torch.ones(case.channels).double() if weight is None else weight
    bias = torch.zeros(case.channels).double() if bias is None else bias
    tracked = 0
    for number in range(case.passes):
        batches = [make_batch(case, number, member) for member in range(len(case.shapes))]
        x = torch.cat([rows(x) for x, _ in batches]).requires_grad_()
        dy = torch.cat([rows(dy) for _, dy in batches])
        count = len(x)
        mean = x.sum(0) / max(count, 1)
        var = (x - mean).square().sum(0) / max(count, 1)
        invstd = (var + case.eps).rsqrt()
        xhat = (x - mean) * invstd
        y = xhat * weight + bias
        (dx,) = torch.autograd.grad(y, x, dy)
        x, mean, var, invstd, xhat, y = (t.detach() for t in (x, mean, var, invstd, xhat, y))

        largest = x.abs().amax(0) if count else torch.zeros_like(mean)
        mean_error = 32 * eps * (x - mean).abs().mean(0).nan_to_num() + 4 * EPS64 * largest
        var_error = 32 * eps * var + 4 * EPS64 * (var + largest.square())
        # Values are centered at the mean rounded to eps; the remainder of the mean is part of them.
        spread = (xhat.abs().amax(0) if count else 0) + eps * largest * invstd
        invstd_error = var_error * invstd.square()  # relative
        xhat_error = spread * invstd_error + mean_error * invstd + 8 * eps * spread
        y_error = weight.abs() * xhat_error + 8 * eps * bias.abs()
        largest_dy = dy.abs().amax(0) if count else torch.zeros_like(mean)
        # Three terms: dy, its mean, and xhat times the mean of dy * xhat.
        dx_scale = weight.abs() * invstd * largest_dy * (2 + spread)
        dx_error = dx_scale * (32 * eps + invstd_error + xhat_error)

        tracked += count > 0
        share = (1 / tracked if tracked else 0) if case.momentum is None else case.momentum
        start = 0
        for member, passes in enumerate(results):
            result = passes[number]
            own = slice(start, start := start + math.prod(case.shapes[member]) // case.channels)
            assert_near("output", result.output, y[own], y_error)
            if case.needs_grad[member]:
                assert_near("grad_input", result.grad_input, dx[own], dx_error)
            for name, terms, error in (
                ("grad_weight", dy[own] * xhat[own], dy[own].abs().sum(0) * xhat_error),
                ("grad_bias", dy[own], 0),
            ):
                grad = getattr(result, name)
                assert (grad is None) == (case.vectors[name == "grad_bias"] is None)
                if grad is not None:
                    error = error + 32 * eps * terms.abs().sum(0)
                    assert_near(name, grad, terms.sum(0), error)
            check_running(case, result, running, count, share, mean, var, mean_error, var_error)
            assert result.num_batches_tracked == (tracked if case.vectors[2] else None)
            for ours, first in zip(result[4:6], results[0][number][4:6], strict=True):
                assert ours is first is None or torch.equal(ours, first)
        # The next pass starts from the rounded ones.
        running = [None if t is None else t.double() for t in results[0][number][4:6]]


def check_running(case, result, before, count, share, mean, var, mean_error, var_error) -> None:
    if before[0] is None:
        assert result.running_mean is None and result.running_var is None
        return
    share = share if count else 0
    unbiased = count / (count - 1) if count > 1 else 1
    new_mean = (1 - share) * before[0] + share * mean
    new_var = (1 - share) * before[1] + share * unbiased * var
    fits = new_var <= torch.finfo(result.running_var.dtype).max  # a NaN never does
    if count and case.momentum is None:
        before = [torch.full_like(old, torch.nan) for old in before]
    new_mean, new_var = new_mean.where(fits, before[0]), new_var.where(fits, before[1])
    for name, new, error in (
        ("running_mean", new_mean, share * mean_error),
        ("running_var", new_var, share * unbiased * var_error),
    ):
        running = getattr(result, name)
        assert torch.equal(running.isnan(), new.isnan()), name
        assert_near(name, running.nan_to_num(), new.nan_to_num(), error)


def note_repeat(case: Case) -> None:
    """Say how to repeat a case, if it fails."""
    note(f'PYTHONPATH=tests python -c "from support.fuzzing import *; repeat({case})"')


def check_on(pool: Ranks, case: Case) -> None:
    note_repeat(case)
    results = pool.run(run, case)
    members = case.group or range(pool.world_size)
    check(case, [[Results(*values) for values in results[rank]] for rank in members])


def check_alone(
    case: Case, kind: type[nn.Module] = syncbn.SyncBatchNorm, dtype: torch.dtype | None = None
) -> None:
    """Check a layer of this process, in ``dtype`` if it is given."""
    note_repeat(case)
    layer = make_layer(case, kind).to(dtype)
    batches = [make_batch(case, number, 0) for number in range(case.passes)]
    results = [train(layer, x.to(dtype), dy.to(dtype)) for x, dy in batches]
    check(case, [results])


def repeat(case: Case) -> None:
    """Run a case again, in new processes."""
    with Ranks(len(case.shapes) if case.group is None else 3) as pool:
        check_on(pool, case)
