"""One run: measures everything into a CSV file named after the device.

Needs an otherwise idle machine. The full suite takes 15 to 30 minutes on two cores.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.accuracy import accuracy_rows
from benchmarks.cases import CUDA_SUITES, SUITES
from benchmarks.rows import RESULTS, Row, write
from benchmarks.scaling import scaling_rows
from benchmarks.stamp import device_slug, stamp
from benchmarks.timings import ALLOCATORS
from syncbn.ops import _extension

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "benchmarks"


def why_no_cuda() -> str | None:
    """Return the reason why no run on a GPU is possible, or None."""
    if _extension.cuda_missing:
        return f"syncbn has no CUDA operators: {_extension.cuda_missing}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def measure(device_type: str, suite_name: str, folder: Path | None) -> Path:
    """Measure into a new file, replace the old one when it is complete, and return its path."""
    if folder is None:  # a subset never replaces full results
        folder = RESULTS if suite_name == "full" else BUILD
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device(device_type)
    path = folder.resolve() / f"{device_slug(device)}.csv"
    unfinished = path.with_suffix(".csv.unfinished")
    unfinished.unlink(missing_ok=True)
    _run_timings(unfinished, suite_name, device)
    write(unfinished, (stamp(row, device) for row in _other_rows(suite_name, device)))
    return unfinished.replace(path)


def _run_timings(path: Path, suite_name: str, device: torch.device) -> None:
    """Run one process, on the CPU one per allocator; each appends to the file."""

    def run(module: str, *args: str, **variables: str) -> None:
        command = [sys.executable, "-m", module, str(path), suite_name, *args]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)

    if device.type == "cuda":
        run("benchmarks.cuda_timings")
        return
    for allocator, variables in ALLOCATORS.items():
        run("benchmarks.timings", allocator, **variables)


def _other_rows(suite_name: str, device: torch.device) -> Iterator[Row]:
    """Yield the rows of other quantities than times; counts on CPUs also hold for GPUs."""
    if device.type == "cpu":
        yield from scaling_rows(SUITES[suite_name].worlds)
    suites = CUDA_SUITES if device.type == "cuda" else SUITES
    yield from accuracy_rows(suites[suite_name], device)
