"""docs/pytorch2.md: the programs that PyTorch limits end as the document says."""

import re
import runpy
import warnings

import pytest
import torch.distributed as dist
from support.paths import ROOT
from support.ranks import Failure, Ranks

DOCUMENT = ROOT / "docs" / "pytorch2.md"
PROGRAM = re.compile(r"^### (.*)\n(?:(?!^#).*\n)*?```python\n((?:.*\n)*?)```", re.MULTILINE)
PROGRAMS = dict(PROGRAM.findall(DOCUMENT.read_text()))


def test_every_program_is_run_below():
    assert len(PROGRAMS) == DOCUMENT.read_text().count("```python")


def run(rank, world_size, path):
    dist.destroy_process_group()
    warnings.resetwarnings()
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("heading", PROGRAMS)
def test_program_ends_as_it_says(tmp_path, heading):
    """The program runs as printed, in a process that has only imported torch and syncbn."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[heading])
    with Ranks(1, case_seconds=240) as ranks:
        (outcome,) = ranks.outcomes(run, str(program))
    last_line = PROGRAMS[heading].splitlines()[-1]
    if not last_line.startswith("# "):
        assert not isinstance(outcome, Failure), outcome.text
        return
    assert isinstance(outcome, Failure)
    # Python puts the module before some classes.
    ending = rf"^([\w.]+\.)?{re.escape(last_line[2:])}"
    assert re.search(ending, outcome.text, re.MULTILINE), outcome.text
