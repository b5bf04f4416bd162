"""Writes the tables of docs/troubleshooting.md: ``python -m tools.troubleshooting``.

A row is a mark of a test: ``@pytest.mark.trouble(symptom, cause, what_to_do)``. Text in “” is what
the program says. The marks are read from the sources: no test is imported.
"""

import ast
from pathlib import Path
from typing import NamedTuple

from tools.generated_block import replace_block

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "troubleshooting.md"
BLOCK = "tables of troubles"

# The tables, by folders of the tests.
TABLES = {
    "Hangs and errors of several ranks": ("ranks",),
    "Layers, conversion, NaN, out of memory": ("layer",),
    "Installation and devices": ("package", "cuda"),
}
HEAD = """\
| symptom | cause | what to do |
|---|---|---|
"""


class Trouble(NamedTuple):
    """A row, and the file of its test."""

    path: Path
    symptom: str
    cause: str
    advice: str


def troubles(folder: Path) -> list[Trouble]:
    """Return the troubles that the tests of a folder are marked with."""
    return [
        Trouble(path, *map(ast.literal_eval, mark.args))
        for path in sorted(folder.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.trouble"
    ]


def tables() -> str:
    """Return the tables with their headings; symptoms without a message are first."""
    text = ""
    for heading, folders in TABLES.items():
        rows = [row for name in folders for row in troubles(ROOT / "tests" / name)]
        rows.sort(key=lambda row: row.symptom.startswith("“"))
        text += f"\n## {heading}\n\n{HEAD}"
        text += "".join(f"| {row.symptom} | {row.cause} | {row.advice} |\n" for row in rows)
    return text + "\n"


def main() -> None:
    """Rewrite the document in place."""
    DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), BLOCK, tables()))


if __name__ == "__main__":
    main()
