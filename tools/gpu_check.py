"""Builds, tests and measures on a machine with a GPU: ``python3 -m tools.gpu_check FOLDER``.

Needs torch with CUDA, NumPy, nvcc, ninja and pytest, and no network. Builds in place and installs
nothing. Without a GPU ``make standin`` runs the CUDA tests. It does not cover ptxas's code, a GPU's
memory order, NCCL's network and time.

Each part writes a log and has a time limit, nine minutes in total. A failed part does not stop the
others; the exit status and summary.txt report it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
TAIL = 25  # last lines of a failed part's log, repeated at the end

# Folders of tests marked cuda, in parts that run in parallel. Other folders need more packages.
TESTS = {
    "ranks": ["tests/ranks"],
    "sanitizer": ["tests/sanitizer"],
    "others": ["tests/compile", "tests/cuda", "tests/layer", "tests/operators"],
}
# Processes for each part, if pytest-xdist is installed; a test of ranks starts more. Each process
# takes about 1 GiB of the GPU, and more processes than these have filled 80 GiB.
WORKERS = {"ranks": 3, "sanitizer": 2, "others": 5}

FIND_DEVICE = """
import torch
if torch.version.cuda is None:
    raise RuntimeError(f"torch {torch.__version__} is built without CUDA")
torch.cuda.init()
print("{}.{}".format(*torch.cuda.get_device_capability()))
print(torch.cuda.get_device_name())
"""


@dataclass
class Part:
    """A command with its time limit; its log has the same name."""

    name: str
    command: list[str]
    seconds: int  # the limit
    env: dict[str, str]


@dataclass
class Outcome:
    """The result of a part."""

    name: str
    result: str
    seconds: float
    log: Path

    @property
    def passed(self) -> bool:
        """Whether the command exited with status 0 within its limit."""
        return self.result == "passed"

    def __str__(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"{self.name:<12} {self.result:<22} {self.seconds:4.0f} s   {last}"


def run_at_once(parts: list[Part], output: Path) -> list[Outcome]:
    """Run parts in parallel; kill a part and its child processes at its limit."""
    begin = time.monotonic()
    processes = []
    for part in parts:
        with (output / f"{part.name}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    part.command,
                    cwd=ROOT,
                    env={**os.environ, **part.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    outcomes: dict[str, Outcome] = {}
    while len(outcomes) < len(parts):
        time.sleep(0.1)
        for part, process in zip(parts, processes, strict=True):
            seconds = time.monotonic() - begin
            status = process.poll()
            if part.name in outcomes or (status is None and seconds < part.seconds):
                continue
            result = f"failed, exit status {status}" if status else "passed"
            if status is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                result = f"stopped at {part.seconds} s"
            outcomes[part.name] = Outcome(part.name, result, seconds, output / f"{part.name}.log")
    return [outcomes[part.name] for part in parts]


def find_device() -> tuple[str, str]:
    """Return compute capability and name of the GPU, or exit with a message."""
    result = subprocess.run([sys.executable, "-c", FIND_DEVICE], capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip() or "Python was killed").splitlines()[-1]
        sys.exit(
            f"gpu-check needs a CUDA device, but {sys.executable} finds none: {reason}\n"
            "Without a GPU `make standin` runs the CUDA tests; it does not cover ptxas's code, "
            "a GPU's memory order, NCCL's network and time"
        )
    capability, name = result.stdout.splitlines()
    return capability, name


def stages(output: Path) -> list[list[Part]]:
    """Return stages of parts that run in parallel; the benchmark is a stage of its own."""
    python = sys.executable
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]  # the caller's folders come first
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    test_env = {**env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins may warn
    build_env = {**env, "SYNCBN_CUDA": "1", "TORCH_CUDA_ARCH_LIST": ""}  # this GPU only
    # The cache of another machine's run is useless; a hanging test shows its stack.
    pytest = [python, "-m", "pytest", "-m", "cuda", "--require-cuda", "-v", "-ra"]
    pytest += ["--durations=10", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=100"]
    tests = []
    for name, paths in TESTS.items():
        workers = ["-p", "xdist", "-n", str(WORKERS[name])] if find_spec("xdist") else []
        tests.append(Part(name, [*pytest, *workers, *paths], 290, test_env))
    # The host time of a layer: it depends on the machine too.
    host = f"'{python}' -m benchmarks.cuda_host"
    environment = f"'{python}' -m syncbn info && nvidia-smi && {host}"
    # "python -m benchmarks run" would need matplotlib.
    benchmark = [python, "-m", "benchmarks.cuda", str(output / "benchmark.csv"), "quick"]
    return [
        [Part("build", [python, "setup.py", "build_ext", "--inplace"], 100, build_env)],
        [Part("environment", ["sh", "-c", environment], 60, env)],
        tests,
        [Part("benchmark", benchmark, 90, env)],
    ]


def main() -> None:
    """Run all parts, print and write the summary, and exit with 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the folder for logs and results")
    output = parser.parse_args().output.resolve()
    capability, device = find_device()
    output.mkdir(parents=True, exist_ok=True)
    (output / "benchmark.csv").unlink(missing_ok=True)  # else rows would be appended

    outcomes = []
    for parts in stages(output):
        print(*(part.name for part in parts), "...", flush=True)
        outcomes += run_at_once(parts, output)

    for outcome in outcomes:
        if not outcome.passed:
            lines = outcome.log.read_text(errors="replace").splitlines()
            print(f"\n--- last lines of {outcome.log}", *lines[-TAIL:], sep="\n")
    summary = "\n".join([f"{device}, compute capability {capability}", *map(str, outcomes)])
    (output / "summary.txt").write_text(f"{summary}\n")
    print(f"\n{summary}")
    sys.exit(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    main()
