"""Rows of a CSV file, the format of all results. Needs only Python."""

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"


class Spread(NamedTuple):
    """A sample's median and quartiles."""

    median: float
    q1: float
    q3: float


def spread(samples: Sequence[float]) -> Spread:
    """Return median and quartiles; all three are the value of a single sample."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, q1, q3)


@dataclass(frozen=True)
class Row:
    """A measured, counted or projected number with its origin."""

    # layer, operators, overhead, scaling, accuracy or sweep (its parts are "shape of a net"); on
    # CUDA also launches and collectives. On CUDA a net is the sum of its layers, which are in
    # "layer of a net" and "operators of a net".
    benchmark: str
    case: str
    dtype: str
    layout: str
    shape: str  # such as 16x64x112x112
    threads: int
    allocator: str  # tuned: freed memory is reused; default: large tensors are newly mapped
    quantity: str
    variant: str  # a/b is the ratio of a's time to b's in each round
    kind: str  # measured, counted, projection, or geometric mean
    median: float  # or mean
    q1: float  # for a mean, the smallest
    q3: float  # for a mean, the largest
    unit: str  # us, ratio, bytes, calls or relative error
    repeats: int
    torch: str = ""
    syncbn: str = ""
    commit: str = ""
    device: str = ""
    date: str = ""


# Types of the columns other than text.
_TYPES: dict[str, Callable[[str], Any]]
_TYPES = {"threads": int, "median": float, "q1": float, "q3": float, "repeats": int}


def where(row: Row) -> tuple[object, ...]:
    """Return the key of a measurement, common to its variants."""
    inputs = (row.case, row.dtype, row.layout, row.shape)
    return (row.benchmark, *inputs, row.threads, row.allocator, row.quantity)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a CSV file; a new one gets the header."""
    names = [field.name for field in fields(Row)]
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(names)
        for row in rows:
            values = [getattr(row, name) for name in names]
            writer.writerow([f"{v:.5g}" if isinstance(v, float) else v for v in values])
            file.flush()  # keeps the rows of an interrupted run


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file.

    Raises:
        ValueError: The file has other columns.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        expected = [field.name for field in fields(Row)]
        if reader.fieldnames != expected:
            raise ValueError(f"{path}: expected columns {expected}, but got {reader.fieldnames}")
        return [Row(**{n: _TYPES.get(n, str)(v) for n, v in line.items()}) for line in reader]
