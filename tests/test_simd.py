"""One binary for every processor: the operators are right with each instruction set it has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from syncbn._extension import build_info

TESTS = Path(__file__).parent
OPERATORS = [*sorted(TESTS.glob("test_batch_norm_*.py")), TESTS / "test_streaming.py"]
LEVELS = ["DEFAULT", "AVX2", "AVX512"]


def run_with(instruction_set, *command):
    """Run Python where torch's own variable asks for no more than an instruction set."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=TESTS,
        env={**os.environ, "ATEN_CPU_CAPABILITY": instruction_set},
        capture_output=True,
        text=True,
        timeout=480,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_operators_are_right_with_each_instruction_set(level):
    highest = build_info["instruction_set"]
    if LEVELS.index(level) > LEVELS.index(highest):
        pytest.skip(f"this processor has {highest} at most")
    code = "from syncbn._extension import build_info; print(build_info['instruction_set'])"
    assert run_with(level.lower(), "-c", code).stdout.split() == [level]
    options = ["-q", "-p", "no:cacheprovider"]
    tests = run_with(level.lower(), "-m", "pytest", *options, *OPERATORS)
    assert tests.returncode == 0, tests.stdout
