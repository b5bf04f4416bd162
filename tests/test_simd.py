"""One binary for every processor: the operators are right with each instruction set it has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
OPERATORS = sorted(TESTS.glob("test_batch_norm_*.py"))
FOUND = "from syncbn._extension import build_info; print(build_info['instruction_set'])"


def run_with(instruction_set, *command):
    """Run Python where torch's own variable asks for no more than an instruction set."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=TESTS,
        env={**os.environ, "ATEN_CPU_CAPABILITY": instruction_set},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("instruction_set", ["default", "avx2", "avx512"])
def test_operators_are_right_with_each_instruction_set(instruction_set):
    found = run_with(instruction_set, "-c", FOUND).stdout.strip()
    if found != instruction_set.upper():
        pytest.skip(f"this processor has {torch.backends.cpu.get_cpu_capability()} at most")
    assert OPERATORS
    tests = run_with(instruction_set, "-m", "pytest", "-q", "-p", "no:cacheprovider", *OPERATORS)
    assert tests.returncode == 0, tests.stdout
