"""The command line of the experiment: build, run, choose. Without a GPU, ``run`` only runs dry."""

import argparse
import sys
from pathlib import Path

from benchmarks.experiment import build as builder
from benchmarks.experiment.build import MEMORY, PRESENT, VARIANTS, Library
from benchmarks.experiment.choose import COLD, report, wrong_row
from benchmarks.results import read, write
from tools.gpu_check import Part, run_at_once

# Limits in seconds; together less than nine minutes. A hang costs only its own part.
CHECK_SECONDS = 50
MEMORY_SECONDS = 70
OPERATORS_SECONDS = {256: 190, 32: 220}  # by the number of images
CHECKED_IMAGES = 32


def build(args: argparse.Namespace) -> None:
    """Build all libraries for a GPU."""
    libraries = [Library(name) for name in (MEMORY, *VARIANTS)]
    builder.build(libraries)
    print(*(library.built() for library in libraries), sep="\n")


def run(args: argparse.Namespace) -> None:
    """Check, measure and choose; exit with 1 if a part failed."""
    names = list(dict.fromkeys([PRESENT, *args.variants]))
    if unknown := set(names) - set(VARIANTS):
        sys.exit(f"expected variants of {', '.join(VARIANTS)}, but got {', '.join(unknown)}")
    libraries = [Library(name, args.dry) for name in names]
    if args.dry:
        builder.build(libraries)
    else:
        libraries.append(Library(MEMORY))
    try:
        for library in libraries:
            library.built()
    except FileNotFoundError as error:
        sys.exit(str(error))
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "experiment.csv"
    path.unlink(missing_ok=True)
    write(path, [])  # the head; several parts append at once

    options = ["--dry"] * args.dry
    patience = 10 if args.dry else 1  # emulated threads are slow on a busy machine
    checked = ("operators", path, CHECKED_IMAGES, "--check", *options)
    checks = [part(f"check-{name}", patience * CHECK_SECONDS, *checked, name) for name in names]
    outcomes = run_at_once(checks, folder)
    right = [name for name, outcome in zip(names, outcomes, strict=True) if outcome.passed]
    failed = (name for name in names if name not in right)
    write(path, (wrong_row(COLD, ("check", "", "", ""), "check", name) for name in failed))
    if args.dry:
        print("memory patterns are skipped: they need a GPU")
    else:
        outcomes += run_at_once([part("memory", MEMORY_SECONDS, "memory", path)], folder)
    for images, seconds in OPERATORS_SECONDS.items() if right else ():
        arguments = ("operators", path, images, *options, *right)
        timing = part(f"operators-{images}", patience * seconds, *arguments)
        outcomes += run_at_once([timing], folder)

    lines = list(report(read(path)))
    (folder / "chosen.txt").write_text("".join(f"{line}\n" for line in lines))
    print(*outcomes, *lines, sep="\n")
    sys.exit(not all(outcome.passed for outcome in outcomes))


def part(name: str, seconds: int, module: object, *arguments: object) -> Part:
    """Return a part: a module of this package in a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.experiment.{module}", *map(str, arguments)]
    return Part(name, command, seconds, {"PYTHONUNBUFFERED": "1"})


def choose(args: argparse.Namespace) -> None:
    """Print the report of a run."""
    print(*report(read(args.results)), sep="\n")


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiment")
    commands = parser.add_subparsers(required=True, metavar="build | run | choose")

    about = "build all libraries for sm_90 into build/experiment/, without a GPU"
    commands.add_parser("build", help=about, description=about).set_defaults(call=build)

    about = (
        "check, measure and choose, in nine minutes at most; write experiment.csv and chosen.txt"
    )
    command = commands.add_parser("run", help=about, description=about)
    command.set_defaults(call=run)
    command.add_argument("folder", type=Path)
    command.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=list(VARIANTS),
        help="some of the variants, as NAME,NAME; the present kernels are always measured",
    )
    command.add_argument(
        "--dry", action="store_true", help="on a CPU, to try the code: its figures mean nothing"
    )

    about = "print the choice that the rows of a run lead to"
    command = commands.add_parser("choose", help=about, description=about)
    command.set_defaults(call=choose)
    command.add_argument("results", type=Path, metavar="FILE.csv")

    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
