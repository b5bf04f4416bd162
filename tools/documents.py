"""Writes the generated tables of the documentation: ``python -m tools.documents``.

- docs/failures.md: the tested faults of tests/support/faults.py.
- docs/troubleshooting.md: the marks ``@pytest.mark.trouble(symptom, cause, what_to_do)``. Text in
  “” is what the program says. The marks are read from the sources: no test is imported.
- docs/works/README.md: docs/works/*.json. ``pytest -m works --works=docs/works`` records there the
  outcomes of the tests marked ``works(text)`` with the installed torch. ``works`` of
  ``tools/maintain.mk`` records them with the oldest and the newest torch.

A table stands between two marker lines: ``<!-- name -->`` and ``<!-- end of name -->``.
"""

import ast
import importlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMMAND = "make -f tools/maintain.mk works"  # records the outcomes


def replace_block(document: str, name: str, text: str) -> str:
    """Return the document with ``text`` between its markers.

    Raises:
        ValueError: A marker is missing.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"expected the lines {begin!r} and {end!r}")
    return before + begin + text + end + after


def row(*cells: str) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |\n"


def head(*cells: str) -> str:
    """Return the first two lines of a table."""
    return row(*cells) + "|" + "---|" * len(cells) + "\n"


def failures() -> str:
    """Return the table of failures; faults with the same texts share a row."""
    sys.path.append(str(ROOT / "tests"))
    rows = dict.fromkeys(map(_failure, importlib.import_module("support.faults").FAULTS))
    return head("one rank", "that rank", "the others", "over NCCL", "what to do") + "".join(rows)


def _failure(fault: Any) -> str:
    alike = fault.that_rank is fault.others
    that_rank = "same as the others" if alike else fault.that_rank.words
    return row(fault.what, that_rank, fault.others.words, _over_nccl(fault), fault.advice)


def _over_nccl(fault: Any) -> str:
    """Return the others' outcome, and that rank's if it differs from the one on CPUs."""
    if not fault.runs_over_nccl:
        return "not tested"
    that_rank, others = fault.that_rank, fault.others
    if that_rank.over_nccl is None or that_rank is others:
        return str(others.late.words)
    return f"{others.late.words}; that rank: {that_rank.late.words}"


# The tables of troubles, by folders of the tests.
TROUBLES = {
    "Hangs and errors of several ranks": ("ranks",),
    "Layers, conversion, NaN, out of memory": ("layer",),
    "Installation and devices": ("package", "cuda"),
}


class Trouble(NamedTuple):
    """A row, and the file of its test."""

    path: Path
    symptom: str
    cause: str
    advice: str


def find_troubles(folder: Path) -> list[Trouble]:
    """Return the troubles that the tests of a folder are marked with."""
    return [
        Trouble(path, *map(ast.literal_eval, mark.args))
        for path in sorted(folder.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.trouble"
    ]


def troubles() -> str:
    """Return the tables of troubles with their headings; symptoms without a message are first."""
    text = ""
    for heading, folders in TROUBLES.items():
        found = [trouble for name in folders for trouble in find_troubles(ROOT / "tests" / name)]
        found.sort(key=lambda trouble: trouble.symptom.startswith("“"))
        text += f"\n## {heading}\n\n" + head("symptom", "cause", "what to do")
        text += "".join(row(*trouble[1:]) for trouble in found)
    return text + "\n"


# By text and marked test: the number of cases by outcome. Outcomes are "passed", "failed" or
# "skipped: " with the reason; there are none if the tests were only collected.
Rows = dict[str, dict[str, dict[str, int]]]
# Rows, with their torch, Python, machine and date.
Recording = dict[str, Any]


def read_recordings(folder: Path) -> list[Recording]:
    """Return the recordings of a folder, sorted by torch version."""
    recordings = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(recordings, key=lambda r: [int(n) for n in re.findall(r"\d+", r["torch"])])


def marked(rows: Rows) -> set[tuple[str, str]]:
    """Return all pairs of a text and a test."""
    return {(text, test) for text, tests in rows.items() for test in tests}


def works(recordings: list[Recording]) -> str:
    """Return the table of what works.

    Raises:
        ValueError: The recordings are of different tests, or some tests did not run.
    """
    expected = marked(recordings[0]["rows"])
    for recording in recordings:
        differing = marked(recording["rows"]) ^ expected
        if differing:
            raise ValueError(
                f"expected recordings of the same tests, but {recording['torch']} and "
                f"{recordings[0]['torch']} differ in {sorted(differing)}; run `{COMMAND}`"
            )
    text = head("what", *(f"torch {recording['torch']}" for recording in recordings), "tests")
    for what, tests in recordings[0]["rows"].items():
        outcomes = (_outcome(recording["rows"][what]) for recording in recordings)
        text += row(what, *outcomes, ", ".join(map(_link, tests)))
    text += "\n"
    for r in recordings:
        text += f"- torch {r['torch']}: {r['date']}, Python {r['python']}, {r['machine']}\n"
    return text


def _outcome(tests: dict[str, dict[str, int]]) -> str:
    cases: Counter[str] = Counter()
    for test, outcomes in tests.items():
        if not outcomes:
            raise ValueError(f"expected that {test} was run; run `{COMMAND}`")
        cases.update(outcomes)
    if cases["failed"]:
        return "fails"
    reasons = [outcome.removeprefix("skipped: ") for outcome in cases if outcome != "passed"]
    if not reasons:
        return "works"
    untested = f"not tested: {'; '.join(reasons)}"
    if not cases["passed"]:
        return untested
    return f"works, {cases.total() - cases['passed']} of {cases.total()} {untested}"


def _link(test: str) -> str:
    file, name = test.split("::")
    return f"[{name}](../../{file})"


# The document and the name of each generated block.
BLOCKS = {
    ("failures.md", "table of failures"): failures,
    ("troubleshooting.md", "tables of troubles"): troubles,
    ("works/README.md", "table of what works"): lambda: works(read_recordings(DOCS / "works")),
}

if __name__ == "__main__":
    for (document, name), text in BLOCKS.items():
        path = DOCS / document
        path.write_text(replace_block(path.read_text(), name, text()))
