"""What is measured: the cases that every device is timed on, and the suites of different length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Case:
    """One input of a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def tensor(self, device: torch.device, seed: int = 0) -> Tensor:
        """Return normally distributed values."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(self.shape, generator=generator).to(device, DTYPES[self.dtype])
        if self.layout == "channels_last":
            values = values.contiguous(memory_format=torch.channels_last)
        return values


@dataclass(frozen=True)
class Suite:
    """What is measured, and how long."""

    cases: tuple[Case, ...]
    repeats: int  # samples of each variant
    sample_seconds: float  # at least, for each sample
    worlds: tuple[int, ...]  # world sizes that collectives are counted for
    accuracy_shapes: tuple[tuple[int, ...], ...]
    ratios: tuple[float, ...]  # of mean to standard deviation
    seeds: int  # inputs that errors are taken of


def _grid(name: str, shape: tuple[int, ...], *dtypes: str) -> list[Case]:
    layouts = LAYOUTS if len(shape) == 4 else LAYOUTS[:1]
    return [Case(name, shape, dtype, layout) for dtype in dtypes for layout in layouts]


# Sizes are those of one tensor in float32. What fits no cache is bound by memory; a cache of the
# last level holds the second kind; the third is bound by latency and by the host.
_ALL = (
    *_grid("memory", (16, 64, 112, 112), *DTYPES),  # 51 MB
    *_grid("memory wide", (32, 256, 56, 56), "float32", "bfloat16"),  # 103 MB
    *_grid("cache", (8, 128, 28, 28), *DTYPES),  # 3.2 MB
    *_grid("cache narrow", (32, 16, 56, 56), "float32", "bfloat16"),  # 6.4 MB
    *_grid("maps 7x7", (8, 512, 7, 7), "float32", "bfloat16"),  # 0.8 MB
    *_grid("2-D", (256, 2048), "float32", "bfloat16"),  # 2.1 MB
)
_QUICK = tuple(
    case
    for case in _ALL
    if case.name in ("memory", "cache", "2-D")
    and (case.dtype, case.layout) in (("float32", "contiguous"), ("bfloat16", "channels_last"))
)

SUITES = {
    "full": Suite(
        cases=_ALL,
        repeats=21,
        sample_seconds=0.02,
        worlds=(1, 2, 3, 4, 5, 6, 7, 8),
        accuracy_shapes=((4, 16, 7, 7), (8, 128, 28, 28), (256, 2048)),
        ratios=(1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6),
        seeds=3,
    ),
    "quick": Suite(
        cases=_QUICK,
        repeats=9,
        sample_seconds=0.01,
        worlds=(1, 2, 4),
        accuracy_shapes=((4, 16, 7, 7),),
        ratios=(1, 1e3, 1e6),
        seeds=1,
    ),
    # Shows that everything runs, for tests: its times mean nothing.
    "tiny": Suite(
        cases=(
            *_grid("tiny", (2, 3, 5, 7), "float32"),
            *_grid("tiny 2-D", (4, 5), "bfloat16"),
        ),
        repeats=3,
        sample_seconds=0.0001,
        worlds=(1, 2, 3),
        accuracy_shapes=((2, 3, 5, 7),),
        ratios=(1, 1e3),
        seeds=2,
    ),
}
