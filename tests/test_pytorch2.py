"""docs/pytorch2.md: the programs where PyTorch stands in the way do what is written under them."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parent.parent / "docs" / "pytorch2.md"
PROGRAM = re.compile(r"^### (.*)\n(?:(?!^#).*\n)*?```python\n((?:.*\n)*?)```", re.MULTILINE)
PROGRAMS = dict(PROGRAM.findall(DOCUMENT.read_text()))

# torch's own, on a machine without a GPU and where dynamo makes a Function.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_program_is_run_below():
    assert len(PROGRAMS) == DOCUMENT.read_text().count("```python")


def run(rank, world_size, code):
    """Run a program; return the error that ends it in the words of its last line, or None."""
    try:
        exec(compile(code, f"<{DOCUMENT.name}>", "exec"), {"__name__": DOCUMENT.name})
    except Exception as error:
        return f"# {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("heading", PROGRAMS)
def test_program_ends_as_it_says(two_ranks, heading):
    last_line = PROGRAMS[heading].splitlines()[-1]
    for ending in two_ranks.run(run, PROGRAMS[heading]):
        if last_line.startswith("# "):
            assert ending is not None
            assert ending.startswith(last_line)
        else:
            assert ending is None, ending
