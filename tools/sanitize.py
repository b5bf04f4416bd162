"""Runs the CPU operators under sanitizers: ``python -m tools.sanitize``.

Runs the operator tests with AddressSanitizer and UndefinedBehaviorSanitizer, and two threads that
call layers at once with ThreadSanitizer. Each sanitizer must first report known faults. Builds in
build/sanitize and writes the reports there. Needs g++ with its sanitizers, and pytest.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "sanitizer"

# The memory is one value smaller than the tensor; operators cannot detect this.
OVERFLOW = """
import ctypes, torch
from syncbn.ops import usual as ops
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
memory = (ctypes.c_float * 60).from_address(malloc(59 * 4))
ops.batch_norm_stats(torch.frombuffer(memory, dtype=torch.float32).view(4, 3, 5))
"""
MISALIGNED = """
import torch
from syncbn.ops import usual as ops
weight = torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1)
x = torch.ones(4, 3, 5)
ops.batch_norm_apply(x, ops.batch_norm_stats(x), weight, None, None, None, None, 0.1, 1e-5)
"""
# Without test_simd.py, which reruns the others with each instruction set and a time limit, and
# test_damaged_arguments.py, whose misaligned tensors and 2**40 values sanitizers report.
FOLDER = ROOT / "tests" / "operators"
OTHERS = ("test_simd.py", "test_damaged_arguments.py")
OPERATORS = ["-m", "not cuda", str(FOLDER), *(f"--ignore={FOLDER / other}" for other in OTHERS)]
# The processor's own instruction set, and the lower ones.
INSTRUCTION_SETS = [{}, {"ATEN_CPU_CAPABILITY": "avx2"}, {"ATEN_CPU_CAPABILITY": "default"}]


@dataclass
class Sanitizer:
    """A sanitized build, with faults that it must report and a command that must pass."""

    name: str
    library: str
    flags: str
    options: dict[str, str]
    faults: dict[str, list[str]]  # Python's arguments, by the text of the report
    command: list[str]
    environments: list[dict[str, str]]  # the command runs once in each

    @property
    def folder(self) -> Path:
        """The folder of the build, with its own package ``syncbn``."""
        return ROOT / "build" / "sanitize" / self.name


SANITIZERS = [
    Sanitizer(
        "address",
        "libasan.so",
        # Python's flags define integer overflow; -fno-wrapv undoes this. Checks of uses after scope
        # would triple the compile time.
        "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-wrapv "
        "-fno-sanitize-address-use-after-scope",
        # Python and torch leak.
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        {"heap-buffer-overflow": ["-c", OVERFLOW], "misaligned address": ["-c", MISALIGNED]},
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", *OPERATORS],
        INSTRUCTION_SETS,
    ),
    Sanitizer(
        "thread",
        "libtsan.so",
        "-fsanitize=thread -Wl,--wrap=torch_parallel_for",
        {"TSAN_OPTIONS": "exitcode=66"},
        {"data race": [str(TESTS / "two_threads.py"), "--race"]},
        [str(TESTS / "two_threads.py")],
        [{}],
    ),
]


def find_library(name: str) -> str:
    """Return the path of a library of g++, or exit with a message."""
    if shutil.which("g++") is None:
        sys.exit("sanitize needs g++, which is not on PATH; such as by apt install g++")
    command = ["g++", f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"sanitize needs {name}, which g++ does not find: install its sanitizers")
    return path


def build(sanitizer: Sanitizer) -> None:
    """Build a copy of the sources in the sanitizer's folder."""
    folder = sanitizer.folder
    for name in ("csrc", "syncbn"):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, folder)
    if sanitizer.name == "thread":
        shutil.copy2(TESTS / "fork_join.cpp", folder / "csrc" / "cpu")
    compiler = folder / "g++"
    # The last flags override setup.py's.
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" -O1 -g1 {sanitizer.flags}\n')
    compiler.chmod(0o755)
    env = {**os.environ, "CXX": str(compiler), "SYNCBN_CUDA": "0"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the build in {folder} fails:\n{done.stdout}{done.stderr}")


def run(
    sanitizer: Sanitizer,
    arguments: list[str],
    environment: dict[str, str],
    output: int | None = None,
) -> tuple[int, str]:
    """Run Python with the sanitized package; return its status and the reports."""
    reports = sanitizer.folder / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    log = (
        f":log_path={reports}/report"  # pytest captures the output of a process that dies in a test
    )
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=sanitizer.folder,  # where python -m looks first
        env={
            **os.environ,
            **environment,
            **{name: value + log for name, value in sanitizer.options.items()},
            # A sanitizer looks for libstdc++'s exceptions at startup.
            "LD_PRELOAD": f"{find_library(sanitizer.library)} {find_library('libstdc++.so')}",
            "PYTHONPATH": str(sanitizer.folder),
        },
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        text=True,
    )
    found = [path.read_text(errors="replace") for path in sorted(reports.iterdir())]
    return done.returncode, "".join([done.stdout or "", *found])


def main() -> None:
    """Build and run all sanitizers; exit with 1 at the first report."""
    for sanitizer in SANITIZERS:
        find_library(sanitizer.library)
    for sanitizer in SANITIZERS:
        print(f"{sanitizer.name}: building in {sanitizer.folder} ...", flush=True)
        build(sanitizer)
        for words, fault in sanitizer.faults.items():
            status, report = run(sanitizer, fault, {}, subprocess.PIPE)
            if status == 0 or words not in report:
                sys.exit(f"{sanitizer.name}: expected a report of {words!r}, but got:\n{report}")
        for environment in sanitizer.environments:
            status, report = run(sanitizer, sanitizer.command, environment)
            if status or report:
                sys.exit(
                    f"{report}{sanitizer.name}: failed with status {status} {environment or ''}"
                )
        print(f"{sanitizer.name}: passed", flush=True)


if __name__ == "__main__":
    main()
