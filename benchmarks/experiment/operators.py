"""Times of the variants' operators on the shapes of ResNet-50.

``python -m benchmarks.experiment.operators FILE IMAGES VARIANT ...`` checks and times, with
``--check`` it only checks; ``--dry`` runs emulated threads on a CPU, with fewer and smaller shapes.

Each call uses the next of several inputs, which together exceed four times the L2 cache. Small
layers are also timed with one input, which stays in the cache, and two larger ones beside
multiprocessors that another kernel holds. The two operators of a pass are also timed as a pair: the
second one finds in the cache what the first one has read last.
"""

import argparse
import ctypes
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Case, resnet50
from benchmarks.experiment.build import PRESENT, Library
from benchmarks.experiment.choose import AGAIN, BUSY, COLD, COPY, OF_A_NET, WARM, wrong_row
from benchmarks.experiment.memory import check_launch
from benchmarks.experiment.memory import load as load_memory
from benchmarks.experiment.setting import Setting, timed_rows, write
from benchmarks.measure import Call, Clock, Samples, elapsed, interleave
from benchmarks.results import Row
from benchmarks.traffic import OPERATORS

SINGLE = tuple((operator,) for operator in OPERATORS)
PAIRS = (OPERATORS[:2], OPERATORS[2:])

# In the order of their worth: a part that ends at its limit lacks the last ones.
KINDS = (
    ("float32", "contiguous"),
    ("bfloat16", "channels_last"),
    ("bfloat16", "contiguous"),
    ("float32", "channels_last"),
)

BUSY_SHAPES = ((256, 56), (512, 28))  # channels and map size
BUSY_MULTIPROCESSORS = 24  # as many as NCCL holds
BUSY_NANOSECONDS = 5_000_000
BUSY_REPEATS = 5
LAUNCH_CYCLES = 2_000_000  # about a millisecond

EPS = 1e-5
NUM_PARTIALS = 1 << 22
NUM_COUNTERS = 1 << 16

# Half of the last bit of a bfloat16 is 2**-9. Float32 sums of a thread have some hundred roundings
# of at most 6e-8 each.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2**-8}
SUM_TOLERANCE = 1e-5

_NUMBERS = "op dtype multiprocessors outer channels inner num_partials num_counters"
_POINTERS = """
    stream x dy out message mean invstd count sums weight bias running_mean running_var
    num_batches_tracked grad_weight grad_bias partials counters
"""


class Arguments(ctypes.Structure):
    """The arguments of an operator, as in operators.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    )


Run = Callable[[object], bytes | None]  # of a pointer to arguments; returns an error


def load(variant: str, is_dry: bool) -> Run:
    """Return the function of a variant's library."""
    function = ctypes.CDLL(str(Library(variant, is_dry).built())).run_operator
    function.argtypes = [ctypes.POINTER(Arguments)]
    function.restype = ctypes.c_char_p
    return function


class Buffers(NamedTuple):
    """The tensors of one call."""

    x: Tensor
    dy: Tensor
    out: Tensor


class Layer:
    """A layer of the net: its inputs, and what its operators hand on to each other."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self.case, self.setting = case, setting
        device = setting.device
        self.sets = []
        for seed in range(setting.num_sets(case)):
            x = case.tensor(device, 2 * seed).add_(1)
            dy = case.tensor(device, 2 * seed + 1)
            self.sets.append(Buffers(x, dy, torch.empty_like(x)))
        channels = case.shape[1]

        def zeros(number: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(number, dtype=dtype, device=device)

        def random() -> Tensor:
            return torch.rand(channels, device=device) + 0.5

        self.state = {
            "message": zeros(2 * channels + 1),
            "mean": zeros(channels),
            "invstd": zeros(channels),
            "count": zeros(1),
            "sums": zeros(2 * channels),
            "weight": random(),
            "bias": random(),
            "running_mean": random(),
            "running_var": random(),
            "num_batches_tracked": zeros(1, torch.int64),
            "grad_weight": random(),
            "grad_bias": random(),
            "partials": zeros(NUM_PARTIALS),
            "counters": zeros(NUM_COUNTERS, torch.int32),
        }
        # Made once, for all variants.
        self.pointers = {
            operator: [ctypes.byref(self._arguments(operator, buffers)) for buffers in self.sets]
            for operator in OPERATORS
        }

    def _arguments(self, operator: str, buffers: Buffers) -> Arguments:
        images, channels, *size = self.case.shape
        inner = math.prod(size)
        is_matrix = self.case.layout == "channels_last"
        tensors = {**buffers._asdict(), **self.state}
        return Arguments(
            op=OPERATORS.index(operator),
            dtype=("float16", "bfloat16", "float32").index(self.case.dtype),  # as in DType
            multiprocessors=self.setting.multiprocessors,
            outer=images * inner if is_matrix else images,
            channels=channels,
            inner=1 if is_matrix else inner,
            num_partials=NUM_PARTIALS,
            num_counters=NUM_COUNTERS,
            stream=self.setting.stream,
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )

    def call(self, run: Run, operators: tuple[str, ...], num_sets: int) -> Call:
        """Return a call of operators, one after another, on the next of the sets."""
        pointers = (self.pointers[operator][:num_sets] for operator in operators)
        turns = itertools.cycle(list(zip(*pointers, strict=True)))

        def call() -> None:
            for pointer in next(turns):
                if error := run(pointer):
                    raise RuntimeError(error.decode())

        return call

    def copy(self) -> Call:
        """Return a call that copies an input."""
        turns = itertools.cycle(self.sets)

        def call() -> Tensor:
            buffers = next(turns)
            return buffers.out.copy_(buffers.x)

        return call

    def results(self) -> dict[str, Tensor]:
        """Return the memory of each operator's result."""
        outputs = (self.state["message"], self.sets[0].out, self.state["sums"], self.sets[0].out)
        return dict(zip(OPERATORS, outputs, strict=True))

    def expected(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each operator's result in float64, and the scale of its error."""
        x, dy = self.sets[0].x.double(), self.sets[0].dy.double()
        dims, count = (0, 2, 3), x.numel() // x.size(1)

        def spread_out(values: Tensor) -> Tensor:
            return values.double()[:, None, None]

        mean, var = x.mean(dims), x.var(dims, correction=0)
        invstd = (var + EPS).rsqrt()
        xhat = (x - spread_out(mean)) * spread_out(invstd)
        terms = dy * xhat
        sums = torch.cat([dy.sum(dims), terms.sum(dims)])
        magnitudes = torch.cat([dy.abs().sum(dims), terms.abs().sum(dims)])
        del terms
        squares, one = x.square().sum(dims), torch.full_like(mean[:1], count)
        message = torch.cat([x.sum(dims), squares, one])
        message_magnitudes = torch.cat([x.abs().sum(dims), squares, one])
        weight, bias = self.state["weight"], self.state["bias"]
        y = xhat * spread_out(weight) + spread_out(bias)
        mean_dy, mean_term = (spread_out(part) / count for part in sums.chunk(2))
        dx = (dy - mean_dy - xhat * mean_term) * spread_out(weight * invstd)
        pairs = (
            (message, message_magnitudes),
            (y, 1 + y.abs()),
            (sums, magnitudes),
            (dx, 1 + dx.abs()),
        )
        return dict(zip(OPERATORS, pairs, strict=True))

    def errors(self, run: Run, expected: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Run each operator and return the errors that exceed the tolerance."""
        found = {}
        for operator, result in self.results().items():
            result.fill_(math.nan)
            self.call(run, (operator,), num_sets=1)()
            exact, scale = expected[operator]
            error = ((result.double() - exact).abs() / scale).max().item()
            if self.state["counters"].any():  # zero again after each launch
                error = math.inf
            is_sum = exact.dim() == 1
            tolerance = SUM_TOLERANCE if is_sum else TOLERANCES[self.case.dtype]
            if not error <= tolerance:  # also NaN
                found[operator] = error
        return found


class Timing(NamedTuple):
    """A way of timing a layer's operators."""

    benchmark: str
    calls: tuple[tuple[str, ...], ...]
    num_sets: int
    clock: Clock
    repeats: int


def timings(layer: Layer, busy_clock: Clock | None) -> Iterator[Timing]:
    """Yield the ways of timing this layer."""
    case, setting, number = layer.case, layer.setting, len(layer.sets)
    yield Timing(COLD, (*SINGLE, *PAIRS), number, setting.clock, setting.repeats)
    if case.num_bytes < setting.l2_bytes // 4:
        yield Timing(WARM, SINGLE, 1, setting.clock, setting.repeats)
    if busy_clock is not None and case.shape[1:3] in BUSY_SHAPES:
        yield Timing(BUSY, SINGLE, number, busy_clock, BUSY_REPEATS)


def make_busy_clock() -> Clock:
    """Return a clock of calls on the GPU beside multiprocessors that another kernel holds.

    As gpu_clock, it leaves out the host; that one would wait for the other kernel.
    """
    library, other = load_memory(), torch.cuda.Stream()

    def clock(call: Call, calls: int) -> float:
        for _ in range(10):
            torch.cuda.synchronize()
            busy = (BUSY_MULTIPROCESSORS, BUSY_NANOSECONDS)
            check_launch(library.run_busy(other.cuda_stream, *busy))
            ended = other.record_event()
            torch.cuda._sleep(LAUNCH_CYCLES)  # until all calls are launched
            seconds = elapsed(call, calls)
            if not ended.query():
                return seconds
        raise RuntimeError(f"expected {calls} calls in less than {BUSY_NANOSECONDS} ns")

    return clock


def layer_samples(
    layer: Layer, variants: dict[str, Run], timing: Timing
) -> Iterator[tuple[str, Samples]]:
    """Time each call of all variants; the quantity names the operators."""
    for operators in timing.calls:
        calls = {
            name: layer.call(run, operators, timing.num_sets) for name, run in variants.items()
        }
        if timing.benchmark == COLD and operators == ("batch_norm_apply",):
            calls[COPY] = layer.copy()
        clocks = dict.fromkeys(calls, timing.clock)
        samples = interleave(calls, clocks, timing.repeats, layer.setting.sample_seconds)
        yield "+".join(operators), samples


def check(layer: Layer, variants: dict[str, Run]) -> Iterator[Row]:
    """Yield a row for each wrong result."""
    expected = layer.expected()
    for variant, run in variants.items():
        for operator, error in layer.errors(run, expected).items():
            yield wrong_row(COLD + OF_A_NET, layer.case.columns, operator, variant, error)


def net_rows(cases: list[Case], variants: dict[str, Run], setting: Setting) -> Iterator[Row]:
    """Check and time all layers of a net, and add up the times round by round."""
    busy_clock = make_busy_clock() if setting.device.type == "cuda" else None
    right = dict(variants)
    sums: dict[tuple[str, str], Samples] = {}
    for case in cases:
        layer = Layer(case, setting)
        for row in check(layer, right):
            right = {name: run for name, run in right.items() if name != row.variant}
            yield row
        for timing in timings(layer, busy_clock):
            for quantity, samples in layer_samples(layer, right, timing):
                yield from timed_rows(timing.benchmark + OF_A_NET, case, quantity, samples)
                of_net = sums.setdefault((timing.benchmark, quantity), {})
                for variant, values in samples.items():
                    so_far = of_net.get(variant, [0.0] * len(values))
                    added = zip(so_far, values, strict=True)
                    of_net[variant] = [a + case.layers * b for a, b in added]
    net = cases[0].net
    assert net is not None
    for (benchmark, quantity), of_net in sums.items():
        whole = {name: values for name, values in of_net.items() if name in {*right, COPY}}
        yield from timed_rows(benchmark, net, quantity, whole)


def main() -> None:
    """Append the rows to the file, or check."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiment.operators")
    parser.add_argument("path", type=Path)
    parser.add_argument("images", type=int)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    setting = Setting.dry() if args.dry else Setting.gpu()
    if args.check:
        setting = setting._replace(l2_bytes=0)  # one input for each layer
    variants = {name: load(name, args.dry) for name in args.variants}
    if not args.check and PRESENT in variants:
        variants[AGAIN] = variants[PRESENT]
    torch.manual_seed(0)
    found_wrong = False
    for kind in KINDS:
        cases = resnet50(args.images, *kind)
        if args.dry:
            cases = resnet50(max(1, args.images // 128), *kind)[-2:]
        if args.check:
            rows = [row for case in cases for row in check(Layer(case, setting), variants)]
            found_wrong |= bool(rows)
            write(args.path, rows, setting)
        else:
            write(args.path, net_rows(cases, variants, setting), setting)
    if found_wrong:
        raise SystemExit(f"{', '.join(args.variants)}: wrong values")


if __name__ == "__main__":
    main()
