"""The bytes that the operators of a net read and write, and the time that a copy takes for as many.

On a GPU a copy takes a fixed time, its launch, and a time in proportion to its bytes. Both are
fitted to the copies of one file of results. An operator at a copy's speed takes the fixed time
once, and the time of the bytes that it reads and writes. Kernels that only read can be a tenth
faster.

Needs only Python.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.results import STEP, Row

# The batch norm layers of ResNet-50 for images of 224x224: number of layers, channels, map size.
RESNET50 = (
    (1, 64, 112),
    (6, 64, 56),
    (4, 256, 56),
    (1, 128, 56),
    (7, 128, 28),
    (5, 512, 28),
    (1, 256, 28),
    (11, 256, 14),
    (7, 1024, 14),
    (1, 512, 14),
    (5, 512, 7),
    (4, 2048, 7),
)
NUM_LAYERS = {(channels, size): layers for layers, channels, size in RESNET50}

# The tensors that each reads or writes.
PASSES = {
    "forward": 3,
    STEP: 8,
    "batch_norm_stats": 1,
    "batch_norm_apply": 2,
    "batch_norm_backward_reduce": 2,
    "batch_norm_backward_apply": 3,
}
OPERATORS = tuple(PASSES)[2:]
OF_A_NET = "operators of a net"
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def num_bytes(row: Row) -> int:
    """Return the size of the row's tensor."""
    return _BYTES[row.dtype] * math.prod(map(int, row.shape.split("x")))


class Copy(NamedTuple):
    """The time of a copy, in microseconds."""

    fixed: float
    per_byte: float  # of the tensor, which is read and written

    @classmethod
    def fitted(cls, rows: Iterable[Row]) -> "Copy":
        """Fit to the copies among the rows, by least squares of relative errors."""
        copies = [row for row in rows if row.benchmark == OF_A_NET and row.variant == "copy"]
        # The rows of other operators have the time of a copy times their passes, over two.
        copies = [row for row in copies if PASSES[row.quantity] == 2]
        points = [(num_bytes(row), row.median, row.median**-2) for row in copies]
        total = sum(w for _, _, w in points)
        mean_x = sum(w * x for x, _, w in points) / total
        mean_y = sum(w * y for _, y, w in points) / total
        covariance = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points)
        per_byte = covariance / sum(w * (x - mean_x) ** 2 for x, _, w in points)
        return cls(mean_y - per_byte * mean_x, per_byte)

    def of(self, row: Row) -> float:
        """Return the time of an operator at a copy's speed."""
        return self.fixed + PASSES[row.quantity] / 2 * self.per_byte * num_bytes(row)


class Kernels(NamedTuple):
    """The kernels of one operator, or of all, in all layers of a net; times in microseconds."""

    measured: float
    at_copy_speed: float
    fixed: float  # the part of ``at_copy_speed`` that does not depend on bytes

    @property
    def share(self) -> float:
        """The share of a copy's speed."""
        return self.at_copy_speed / self.measured


def kernels_of(rows: Iterable[Row], copy: Copy) -> Kernels:
    """Add up the operators of the layers of a net, as often as the net has the layer."""
    measured = ideal = fixed = 0.0
    for row in rows:
        _, channels, size, _ = map(int, row.shape.split("x"))
        layers = NUM_LAYERS[channels, size]
        measured += layers * row.median
        ideal += layers * copy.of(row)
        fixed += layers * copy.fixed
    return Kernels(measured, ideal, fixed)
