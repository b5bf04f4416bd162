"""Writes the table of what works in docs/pytorch2.md: ``python -m tools.works``.

The table shows docs/works/*.json. ``pytest -m works --works=docs/works`` records there the outcomes
of the tests marked ``works(text)`` with the installed torch. ``make works`` does both for the
oldest and the newest torch.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from packaging.version import Version

from tools.generated_block import replace_block

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = "table of what works"

# By text and marked test: the number of cases by outcome. Outcomes are "passed", "failed" or
# "skipped: " with the reason; there are none if the tests were only collected.
Rows = dict[str, dict[str, dict[str, int]]]
# Rows, with their torch, Python, machine and date.
Recording = dict[str, Any]


def read(folder: Path) -> list[Recording]:
    """Return the recordings of a folder, sorted by torch version."""
    recordings = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(recordings, key=lambda recording: Version(recording["torch"]))


def marked(rows: Rows) -> set[tuple[str, str]]:
    """Return all pairs of a text and a test."""
    return {(text, test) for text, tests in rows.items() for test in tests}


def table(recordings: list[Recording]) -> str:
    """Return the table.

    Raises:
        ValueError: The recordings are of different tests, or some tests did not run.
    """
    expected = marked(recordings[0]["rows"])
    for recording in recordings:
        differing = marked(recording["rows"]) ^ expected
        if differing:
            raise ValueError(
                f"expected recordings of the same tests, but {recording['torch']} and "
                f"{recordings[0]['torch']} differ in {sorted(differing)}; run `make works`"
            )
    versions = [f"torch {recording['torch']}" for recording in recordings]
    lines = [
        f"| what | {' | '.join(versions)} | tests |",
        "|---|" + "---|" * len(recordings) + "---|",
    ]
    for text, tests in recordings[0]["rows"].items():
        cells = [_cell(recording["rows"][text]) for recording in recordings]
        lines.append(f"| {text} | {' | '.join(cells)} | {', '.join(map(_link, tests))} |")
    lines.append("")
    lines += [
        f"- torch {r['torch']}: {r['date']}, Python {r['python']}, {r['machine']}"
        for r in recordings
    ]
    return "\n".join(lines) + "\n"


def _cell(tests: dict[str, dict[str, int]]) -> str:
    cases: Counter[str] = Counter()
    for test, outcomes in tests.items():
        if not outcomes:
            raise ValueError(f"expected that {test} was run; run `make works`")
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
    return f"[{name}](../{file})"


def main() -> None:
    """Rewrite the document in place."""
    document = DOCS / "pytorch2.md"
    text = table(read(DOCS / "works"))
    document.write_text(replace_block(document.read_text(), BLOCK, text))


if __name__ == "__main__":
    main()
