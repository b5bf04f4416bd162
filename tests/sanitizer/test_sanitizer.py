"""The kernels under compute-sanitizer: memory out of bounds, and races in shared memory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

import syncbn

SCRIPT = Path(__file__).parent / "sanitize_operators.py"
FOUND = 9  # the exit code that we ask for where errors are found

pytestmark = pytest.mark.cuda


def sanitize(tool, *args):
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=f"{cuda_home}/bin"
    )
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "10"]
    # torch's own kernels and driver queries are not checked.
    options += ["--kernel-name", "kernel_substring=syncbn", "--report-api-errors", "no"]
    if tool == "memcheck":
        options += ["--padding", "64"]
    result = subprocess.run(
        [program, *options, sys.executable, str(SCRIPT), *args],
        env={
            **os.environ,
            "PYTHONPATH": f"{Path(syncbn.__file__).parents[1]}{os.pathsep}{ROOT / 'tests'}",
            # Each tensor is its own allocation: past its end there must be no other tensor.
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if "Device not supported" in result.stdout:  # as under some virtual machines
        pytest.skip("compute-sanitizer does not support this device")
    return result


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_operators_are_clean(tool):
    result = sanitize(tool)
    assert result.returncode == 0, result.stdout
    assert re.search(r"\b[1-9]\d* calls of operators", result.stdout), result.stdout


@pytest.mark.parametrize(
    ("tool", "complaint"),
    [("memcheck", "Invalid __global__ write"), ("racecheck", "Race reported")],
)
def test_planted_error_is_found(tool, complaint):
    result = sanitize(tool, "--plant", tool)
    assert result.returncode != 0 and complaint in result.stdout, result.stdout
