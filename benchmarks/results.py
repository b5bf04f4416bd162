"""Rows of results: their CSV file, their origin, and the comparison of two runs.

Only :func:`stamp` and :func:`device_slug` need more than Python.
"""

import contextlib
import csv
import datetime
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
STEP = "forward+backward"  # the quantity of a training step
RATIO = "torch/syncbn"


class Spread(NamedTuple):
    """A sample's median and quartiles."""

    median: float
    q1: float
    q3: float


def spread(samples: Sequence[float]) -> Spread:
    """Return median and quartiles; for a single sample, all three are its value."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, q1, q3)


@dataclass(frozen=True)
class Row:
    """A measured, counted or projected number with its origin."""

    # layer, operators, overhead, scaling, accuracy or sweep (its parts are "shape of a net"); on
    # CUDA also launches, collectives and kernels (of a layer in one process). On CUDA a net is the
    # sum of its layers, which are in "layer of a net", "operators of a net" and "kernels of a net".
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


def stamp(rows: Iterable[Row], device: str) -> Iterator[Row]:
    """Yield the rows of "cpu" or "cuda" with their origin: versions, commit, device and date."""
    import torch

    import syncbn

    origin: dict[str, Any] = {
        "torch": torch.__version__,
        "syncbn": syncbn.__version__,
        "commit": _commit(),
        "device": device_slug(device),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    return (replace(row, **origin) for row in rows)


def device_slug(device: str) -> str:
    """Return the model of the CPU or GPU, spelled for a file name."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_model()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu_model() -> str:
    with contextlib.suppress(FileNotFoundError):  # a system other than Linux
        cpuinfo = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit of this checkout, marked if files differ from it.

    For a copy without git, the environment variable SYNCBN_COMMIT names the commit.
    """
    described = ""
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        command = ["git", "describe", "--always", "--exclude=*", "--dirty"]
        folder = Path(__file__).parent
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        described = result.stdout.strip()
    return described or os.environ.get("SYNCBN_COMMIT") or "unknown"


def regressions(old: list[Row], new: list[Row], tolerance: float) -> list[str]:
    """Return a line for each speed relative to torch that fell by more than ``tolerance``.

    Ratios are measured in one run; absolute times of two runs differ by the machine's load.

    Raises:
        ValueError: The results are of different devices, or have no ratio in common.
    """
    devices = {row.device for row in old + new}
    if len(devices) != 1:
        raise ValueError(f"expected results of one device, but got {sorted(devices)}")
    before = {_where(row): row for row in old if row.variant == RATIO}
    pairs = [
        (before[_where(row)], row) for row in new if row.variant == RATIO and _where(row) in before
    ]
    if not pairs:
        raise ValueError("expected results that measured the same, but got none")
    return [
        f"{_where(now)}: {then.median:.2f} -> {now.median:.2f} times torch"
        for then, now in pairs
        if not now.median >= then.median * (1 - tolerance)  # also for NaN
    ]


def _where(row: Row) -> str:
    """Return the key of a measurement, which all variants share."""
    inputs = (row.case, row.dtype, row.layout, row.shape)
    key = (row.benchmark, *inputs, row.threads, row.allocator, row.quantity)
    return " ".join(map(str, key))
