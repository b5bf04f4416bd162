"""Measures everything, writes benchmarks/results/<device>.csv and draws it beside.

Wants a machine that does nothing else. The full suite takes about half an hour on two cores. GPUs
are timed by cuda_timings.py.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from accuracy import accuracy_rows
from cases import CUDA_SUITES, SUITES
from plot import draw
from rows import RESULTS, Row, write
from scaling import scaling_rows
from stamp import device_slug, stamp
from timings import ALLOCATORS

from syncbn import _extension

BUILD = Path(__file__).parent.parent / "build" / "benchmarks"


def run_timings(path: Path, suite_name: str, device: torch.device) -> None:
    """Start one process, or on the CPU one for each allocator; each appends to the file."""
    folder = Path(__file__).parent
    if device.type == "cuda":
        command = [sys.executable, str(folder / "cuda_timings.py"), str(path), suite_name]
        subprocess.run(command, check=True)
        return
    for allocator, variables in ALLOCATORS.items():
        subprocess.run(
            [sys.executable, str(folder / "timings.py"), str(path), suite_name, allocator],
            env={**os.environ, **variables},
            check=True,
        )


def other_rows(suite_name: str, device: torch.device) -> Iterator[Row]:
    """Yield what is not timed; what is counted on CPUs holds for GPUs, too."""
    if device.type == "cpu":
        yield from scaling_rows(SUITES[suite_name].worlds)
    suites = CUDA_SUITES if device.type == "cuda" else SUITES
    yield from accuracy_rows(suites[suite_name], device)


def main() -> None:
    """Measure into a new file, which replaces the old one when it is complete, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    length = parser.add_mutually_exclusive_group()
    for name in ("quick", "tiny"):
        text = {"quick": "a subset, in minutes", "tiny": "to see that everything runs"}[name]
        length.add_argument(f"--{name}", dest="suite", action="store_const", const=name, help=text)
    parser.add_argument("--output", type=Path, help="a folder; of a subset: build/benchmarks")
    args = parser.parse_args()
    if args.device == "cuda":
        if _extension.cuda_missing:
            parser.error(f"syncbn has no CUDA operators: {_extension.cuda_missing}")
        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA device")
    suite_name = args.suite or "full"
    # A subset never replaces full results.
    folder = args.output or (RESULTS if suite_name == "full" else BUILD)
    folder.mkdir(parents=True, exist_ok=True)

    device = torch.device(args.device)
    path = folder / f"{device_slug(device)}.csv"
    unfinished = path.with_suffix(".csv.unfinished")
    unfinished.unlink(missing_ok=True)
    run_timings(unfinished, suite_name, device)
    write(unfinished, (stamp(row, device) for row in other_rows(suite_name, device)))
    unfinished.replace(path)
    print(path, *draw(path), sep="\n")


if __name__ == "__main__":
    main()
