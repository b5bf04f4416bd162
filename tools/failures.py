"""Writes the table of docs/failures.md: ``python -m tools.failures``.

The rows are the tested faults in tests/support/faults.py.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from tools.generated_block import replace_block

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "failures.md"
BLOCK = "table of failures"


HEAD = """\
| one rank | that rank | the others | over NCCL | what to do |
|---|---|---|---|---|
"""


def table() -> str:
    """Return the table; faults with the same texts share a row."""
    sys.path.append(str(ROOT / "tests"))
    rows = dict.fromkeys(map(_row, importlib.import_module("support.faults").FAULTS))
    return HEAD + "".join(rows)


def _row(fault: Any) -> str:
    alike = fault.that_rank is fault.others
    that_rank = "same as the others" if alike else fault.that_rank.words
    cells = (fault.what, that_rank, fault.others.words, _over_nccl(fault), fault.advice)
    return f"| {' | '.join(cells)} |\n"


def _over_nccl(fault: Any) -> str:
    """Return what becomes of the others, and of that rank if it is something else than on CPUs."""
    if not fault.runs_over_nccl:
        return "not tested"
    that_rank, others = fault.that_rank, fault.others
    if that_rank.over_nccl is None or that_rank is others:
        return str(others.late.words)
    return f"{others.late.words}; that rank: {that_rank.late.words}"


def main() -> None:
    """Rewrite the document in place."""
    DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), BLOCK, table()))


if __name__ == "__main__":
    main()
