"""Times of memory patterns beside torch's kernels: ``python -m benchmarks.experiment.memory FILE``.

Tensors have random float32 values, whatever the dtype of the layer whose size they have.
"""

import ctypes
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.experiment.build import Library
from benchmarks.experiment.choose import MEMORY, wrong_row
from benchmarks.experiment.patterns import PATTERNS, Pattern
from benchmarks.experiment.setting import Setting, timed_rows, write
from benchmarks.measure import Call, interleave
from benchmarks.results import Row

# Layers of ResNet-50, from more than the L2 cache holds to less.
CASES = (
    Case("822 MB", (256, 256, 56, 56), "float32", "contiguous"),
    Case("411 MB", (256, 256, 56, 56), "bfloat16", "contiguous"),
    Case("103 MB", (32, 256, 56, 56), "float32", "contiguous"),
    Case("13 MB", (32, 256, 28, 28), "bfloat16", "contiguous"),
)
VECTOR_BYTES = 16


class Tensors(ctypes.Structure):
    """The tensors of a call, as in memory.cu."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("vectors", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("plane", ctypes.c_int64),
    )


class Buffers(NamedTuple):
    """The tensors of a call: two inputs and an output."""

    a: Tensor
    b: Tensor
    y: Tensor

    def for_kernels(self, case: Case) -> Tensors:
        """Return the tensors as those of a layer."""
        vectors = case.num_bytes // VECTOR_BYTES
        images, channels = case.shape[:2]
        pointers = (tensor.data_ptr() for tensor in self)
        return Tensors(*pointers, vectors, channels, vectors // images // channels)


def load() -> ctypes.CDLL:
    """Return the library of memory.cu."""
    library = ctypes.CDLL(str(Library(MEMORY).built()))
    library.run_pattern.argtypes = [ctypes.c_int, ctypes.c_void_p, Tensors, ctypes.c_int64]
    library.run_empty.argtypes = [ctypes.c_void_p]
    library.run_busy.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    return library


def check_launch(error: int) -> None:
    """Raise the error of a launch.

    Raises:
        RuntimeError: CUDA refused it.
    """
    if error:
        raise RuntimeError(f"a kernel could not be launched: CUDA error {error}")


def num_blocks(pattern: Pattern, channels: int, multiprocessors: int) -> int:
    """Return the number of blocks that share the tensor, or a channel as in plan.h."""
    resident = multiprocessors * pattern.blocks
    if "planes" not in pattern.order:
        return resident
    one_wave = max(1, resident // channels)

    def busy_share(splits: int) -> float:
        waves = math.ceil(channels * splits / resident)
        return channels * splits / (waves * resident)

    wanted = range(one_wave, 8 * one_wave + 1)
    return next((n for n in wanted if busy_share(n) >= 0.9), max(wanted, key=busy_share))


def pattern_call(
    library: ctypes.CDLL, number: int, case: Case, setting: Setting, turns: Iterator[Tensors]
) -> Call:
    """Return a call of a pattern."""
    blocks = num_blocks(PATTERNS[number], case.shape[1], setting.multiprocessors)
    return lambda: check_launch(library.run_pattern(number, setting.stream, next(turns), blocks))


def torch_calls(family: str, turns: Iterator[Buffers]) -> dict[str, Call]:
    """Return torch's calls that read and write as much; none if nothing is written."""

    def copy() -> Tensor:
        buffers = next(turns)
        return buffers.y.copy_(buffers.a)

    def mul() -> Tensor:
        buffers = next(turns)
        return torch.mul(buffers.a, 2.0, out=buffers.y)

    def add() -> Tensor:
        buffers = next(turns)
        return torch.add(buffers.a, buffers.b, out=buffers.y)

    calls: dict[str, dict[str, Call]] = {
        "1 read, 1 written": {"torch copy_": copy, "torch mul": mul},
        "2 read, 1 written": {"torch copy_": copy, "torch add": add},
    }
    return calls.get(family, {})


def is_right(pattern: Pattern, call: Call, buffers: Buffers) -> bool:
    """Run a pattern and return whether its output is right, to the last bit."""
    if not pattern.writes:
        return True
    buffers.y.fill_(math.nan)
    call()
    b = buffers.b if pattern.reads == 2 else torch.ones_like(buffers.b)
    return torch.equal(buffers.y, torch.add(b, buffers.a, alpha=2))


def case_rows(library: ctypes.CDLL, case: Case, setting: Setting) -> Iterator[Row]:
    """Time all patterns on tensors of one size."""
    size = case.num_bytes // 4

    def random() -> Tensor:
        return torch.randn(size, device=setting.device)

    sets = [
        Buffers(random(), random(), torch.empty(size, device=setting.device))
        for _ in range(setting.num_sets(case))
    ]
    for_kernels = [buffers.for_kernels(case) for buffers in sets]
    for family, numbers in by_family().items():
        calls = torch_calls(family, itertools.cycle(sets))
        for number in numbers:
            pattern = PATTERNS[number]
            first = itertools.cycle(for_kernels[:1])
            if is_right(pattern, pattern_call(library, number, case, setting, first), sets[0]):
                turns = itertools.cycle(for_kernels)
                calls[pattern.name] = pattern_call(library, number, case, setting, turns)
            else:
                yield wrong_row(MEMORY, case.columns, family, pattern.name)
        yield from timed(calls, case, family, setting)


def by_family() -> dict[str, list[int]]:
    """Return the numbers of the patterns that read and write the same."""
    families: dict[str, list[int]] = {}
    for number, pattern in enumerate(PATTERNS):
        families.setdefault(pattern.family, []).append(number)
    return families


def timed(calls: dict[str, Call], case: Case, quantity: str, setting: Setting) -> Iterator[Row]:
    """Time calls in turn."""
    clocks = dict.fromkeys(calls, setting.clock)
    samples = interleave(calls, clocks, setting.repeats, setting.sample_seconds)
    yield from timed_rows(MEMORY, case, quantity, samples)


def main(path: str) -> None:
    """Append the rows to the file."""
    library, setting = load(), Setting.gpu()

    def empty() -> None:
        check_launch(library.run_empty(setting.stream))

    nothing = Case("0 MB", (0,), "float32", "contiguous")
    write(Path(path), timed({"an empty kernel": empty}, nothing, "nothing", setting), setting)
    for case in CASES:
        write(Path(path), case_rows(library, case, setting), setting)


if __name__ == "__main__":
    main(*sys.argv[1:])
