"""Runs the tests of a wheel: ``python tools/try_wheel.py``.

The tests of operators, the layer, several ranks and torch.compile need only the dependency group
wheel-test. They run in an empty folder, so that they import the installed syncbn, not the sources.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
TRIED = (
    "operators/test_ops.py",
    "layer/test_functional.py",
    "ranks/test_multi_rank.py",
    "compile/test_compile.py",
)
LEFT_OUT = "not whole_models"  # they need torchvision

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-k",
            LEFT_OUT,
            *(str(TESTS / test) for test in TRIED),
        ]
        sys.exit(subprocess.run(command, cwd=folder).returncode)
