"""Runs the tests that each wheel passes, with each Python: ``python tools/try_wheel.py``.

They are tests of operators, of the layer, of several ranks and of torch.compile that need only the
group wheel-test beside syncbn. They run in an empty folder, so that the installed syncbn is tested
and not the sources.
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
LEFT_OUT = "not whole_models"  # which are torchvision's

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
