"""docs/pytorch2.md: the programs where PyTorch stands in the way do what is written under them."""

import re
import subprocess
import sys

import pytest
from support.paths import ROOT

DOCUMENT = ROOT / "docs" / "pytorch2.md"
PROGRAM = re.compile(r"^### (.*)\n(?:(?!^#).*\n)*?```python\n((?:.*\n)*?)```", re.MULTILINE)
PROGRAMS = dict(PROGRAM.findall(DOCUMENT.read_text()))


def test_every_program_is_run_below():
    assert len(PROGRAMS) == DOCUMENT.read_text().count("```python")


@pytest.mark.parametrize("heading", PROGRAMS)
def test_program_ends_as_it_says(tmp_path, heading):
    """As printed, in a process of its own, which has nothing that the reader has not."""
    (tmp_path / "program.py").write_text(PROGRAMS[heading])
    result = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    last_line = PROGRAMS[heading].splitlines()[-1]
    if not last_line.startswith("# "):
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 1
    # Python puts the module before some classes, and torch the rank before every line.
    ending = rf"^(\[rank0\]: )?([\w.]+\.)?{re.escape(last_line[2:])}"
    assert re.search(ending, result.stderr, re.MULTILINE), result.stderr
