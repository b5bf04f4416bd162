"""The command line of the benchmarks. Imports are local: two commands need only Python."""

import argparse
import sys
from pathlib import Path

from benchmarks.rows import RESULTS, read

ROOT = Path(__file__).parents[1]


def run(args: argparse.Namespace) -> None:
    """Measure this machine and draw the results."""
    from benchmarks.plot import draw
    from benchmarks.run import measure, why_no_cuda

    if args.device == "cuda" and (reason := why_no_cuda()):
        sys.exit(f"python -m benchmarks run: {reason}")
    path = measure(args.device, args.suite, args.output)
    print(path, draw(path), sep="\n")


def table(args: argparse.Namespace) -> None:
    """Rewrite the tables of two documents in place."""
    from benchmarks.table import page, text
    from tools.generated_block import replace_block

    results = [read(path) for path in sorted(args.results.glob("*.csv"))]
    for name, block in {"README.md": text(results), "benchmarks/README.md": page(results)}.items():
        path = args.root / name
        path.write_text(replace_block(path.read_text(), "benchmark table", block))


def compare(args: argparse.Namespace) -> None:
    """Print the regressions; exit with 1 if there are any."""
    from benchmarks.compare import regressions

    found = regressions(read(args.old), read(args.new), args.tolerance)
    print("\n".join(found) or "nothing became slower")
    sys.exit(1 if found else 0)


def plot(args: argparse.Namespace) -> None:
    """Redraw a file of results."""
    from benchmarks.plot import draw

    print(draw(args.results))


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(required=True, metavar="run | table | compare | plot")

    about = "measure everything into results/<device>.csv and draw it, in half an hour at most"
    command = commands.add_parser("run", help=about, description=about)
    command.set_defaults(call=run, suite="full")
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    length = command.add_mutually_exclusive_group()
    for name, text in {"quick": "a subset, in minutes", "tiny": "shows that it runs"}.items():
        length.add_argument(f"--{name}", dest="suite", action="store_const", const=name, help=text)
    command.add_argument(
        "--output", type=Path, help="a folder; default for a subset: build/benchmarks"
    )

    about = "write the tables of README.md and benchmarks/README.md from results/*.csv"
    command = commands.add_parser("table", help=about, description=about)
    command.set_defaults(call=table)
    command.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md")
    command.add_argument("--results", type=Path, default=RESULTS, help="the folder of the CSVs")

    about = "print the regressions between two files of results of one device"
    command = commands.add_parser("compare", help=about, description=about)
    command.set_defaults(call=compare)
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    command.add_argument("--tolerance", type=float, default=0.1, help="as a fraction")

    about = "draw a file of results: FILE.png beside FILE.csv"
    command = commands.add_parser("plot", help=about, description=about)
    command.set_defaults(call=plot)
    command.add_argument("results", type=Path)

    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
