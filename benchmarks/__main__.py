"""The command line of the benchmarks. Imports are local: two commands need only Python."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import ROOT
from benchmarks.results import RESULTS, Row, device_slug, read, regressions, stamp, write


def run(args: argparse.Namespace) -> None:
    """Measure this machine into a file named after the device, and draw the results.

    A complete file replaces the old one. A subset never replaces full results.
    """
    from benchmarks.report import draw

    if args.device == "cuda" and (reason := why_no_cuda()):
        sys.exit(f"python -m benchmarks run: {reason}")
    folder = args.output or (RESULTS if args.suite == "full" else ROOT / "build/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"{device_slug(args.device)}.csv"
    unfinished = path.with_suffix(".csv.unfinished")
    unfinished.unlink(missing_ok=True)
    run_timings(unfinished, args.suite, args.device)
    write(unfinished, stamp(other_rows(args.suite, args.device), args.device))
    unfinished.replace(path)
    print(path, draw(path), sep="\n")


def why_no_cuda() -> str | None:
    """Return the reason why no run on a GPU is possible, or None."""
    import torch

    from syncbn.ops import _extension

    if _extension.cuda_missing:
        return f"syncbn has no CUDA operators: {_extension.cuda_missing}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def run_timings(path: Path, suite: str, device: str) -> None:
    """Run one process, on the CPU one per allocator; each appends to the file."""
    from benchmarks.cpu import ALLOCATORS

    processes: list[tuple[list[str], dict[str, str]]] = [
        (["benchmarks.cuda", str(path), suite], {})
    ]
    if device == "cpu":
        processes = [
            (["benchmarks.cpu", str(path), suite, allocator], variables)
            for allocator, variables in ALLOCATORS.items()
        ]
    for module, variables in processes:
        command = [sys.executable, "-m", *module]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)


def other_rows(suite: str, device: str) -> Iterator[Row]:
    """Yield the rows of quantities other than times; counts on CPUs also hold for GPUs."""
    import torch

    from benchmarks.accuracy import accuracy_rows
    from benchmarks.cases import CUDA_SUITES, SUITES
    from benchmarks.collectives import scaling_rows

    if device == "cpu":
        yield from scaling_rows(SUITES[suite].worlds)
    suites = CUDA_SUITES if device == "cuda" else SUITES
    yield from accuracy_rows(suites[suite], torch.device(device))


def masks(args: argparse.Namespace) -> None:
    """Print the times of layers with masks."""
    from benchmarks.cpu import SHAPES, TINY, mask_lines

    for line in mask_lines(TINY if args.tiny else SHAPES):
        print(line)


def steps(args: argparse.Namespace) -> None:
    """Print the times of whole training steps."""
    from benchmarks.steps import run

    run(args)


def table(args: argparse.Namespace) -> None:
    """Rewrite the tables of two documents in place."""
    from benchmarks.report import page, text
    from tools.documents import replace_block

    results = [read(path) for path in sorted(args.results.glob("*.csv"))]
    for name, block in {"README.md": text(results), "benchmarks/README.md": page(results)}.items():
        path = args.root / name
        path.write_text(replace_block(path.read_text(), "benchmark table", block))


def compare(args: argparse.Namespace) -> None:
    """Print the regressions; exit with 1 if there are any."""
    found = regressions(read(args.old), read(args.new), args.tolerance)
    print("\n".join(found) or "nothing became slower")
    sys.exit(1 if found else 0)


def plot(args: argparse.Namespace) -> None:
    """Redraw a file of results."""
    from benchmarks.report import draw

    print(draw(args.results))


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    names = "run | steps | table | compare | plot | masks"
    commands = parser.add_subparsers(required=True, metavar=names)

    def add(call: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(call.__name__, help=about, description=about)
        command.set_defaults(call=call)
        return command

    command = add(
        run,
        "measure everything into results/<device>.csv and draw it, in half an hour at most, on an "
        "otherwise idle machine",
    )
    command.set_defaults(suite="full")
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    length = command.add_mutually_exclusive_group()
    for name, text in {
        "quick": "a subset, in minutes",
        "tiny": "a smoke test: its figures mean nothing",
    }.items():
        length.add_argument(f"--{name}", dest="suite", action="store_const", const=name, help=text)
    command.add_argument(
        "--output", type=Path, help="a folder; default for a subset: build/benchmarks"
    )

    command = add(steps, "print time, memory and collectives of whole training steps of ResNets")
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument(
        "--tiny", action="store_true", help="a smoke test: its figures mean nothing"
    )
    command.add_argument("--output", type=Path, help="a folder for a CSV")

    command = add(
        table, "write the tables of README.md and benchmarks/README.md from results/*.csv"
    )
    command.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md")
    command.add_argument("--results", type=Path, default=RESULTS, help="the folder of the CSVs")

    command = add(compare, "print the regressions between two files of results of one device")
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    command.add_argument("--tolerance", type=float, default=0.1, help="as a fraction")

    command = add(plot, "draw a file of results: FILE.png beside FILE.csv")
    command.add_argument("results", type=Path)

    about = "print the times of layers with masks relative to no mask; set OMP_NUM_THREADS=1"
    add(masks, about).add_argument(
        "--tiny", action="store_true", help="a smoke test: its figures mean nothing"
    )

    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
