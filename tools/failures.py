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


def table() -> str:
    """Return the table; faults with the same texts share a row."""
    sys.path.append(str(ROOT / "tests" / "support"))
    rows = dict.fromkeys(map(_row, importlib.import_module("faults").FAULTS))
    return "| one rank | that rank | the others | what to do |\n|---|---|---|---|\n" + "".join(rows)


def _row(fault: Any) -> str:
    alike = fault.that_rank is fault.others
    that_rank = "same as the others" if alike else fault.that_rank.words
    return f"| {fault.what} | {that_rank} | {fault.others.words} | {fault.advice} |\n"


def main() -> None:
    """Rewrite the document in place."""
    DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), BLOCK, table()))


if __name__ == "__main__":
    main()
