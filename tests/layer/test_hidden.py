"""Tests of operators and layers pass by torch's expressions too, with the CPU operators hidden.

These files show much in little time. ``hidden`` of ``tools/maintain.mk`` runs ``tests/layer`` and
``tests/ranks`` as well.
"""

import os
import re
import subprocess
import sys

import pytest
from support import hidden
from support.paths import ROOT

FILES = [
    *(f"tests/operators/test_batch_norm_{name}.py" for name in ("stats", "apply")),
    *(f"tests/operators/test_batch_norm_backward_{name}.py" for name in ("reduce", "apply")),
    *(f"tests/operators/test_{name}.py" for name in ("activations", "single_process", "tail")),
    *(f"tests/layer/test_{name}.py" for name in ("functional", "layout", "masks", "reference")),
    "tests/ranks/test_masks.py",
]


@pytest.mark.any_torch
def test_expressions_pass_the_tests_of_the_operators():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    environment = {**os.environ, hidden.VARIABLE: "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = result.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None and int(passed[1]) > 600, summary
    assert "19 deselected" in summary  # hidden.NOT_RUN has the reasons
