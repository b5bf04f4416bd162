"""The table of what works in docs/pytorch2.md, made of the results of tests marked ``works(text)``.

``pytest -m works --works=docs/works`` writes what became of them, under the torch it runs with, to
docs/works/<version>.json; ``python tests/works.py`` makes the table of all these files. ``make
works`` does both for the oldest and the newest torch.
"""

import datetime
import json
import platform
from collections import Counter
from pathlib import Path

import pytest
import torch
from packaging.version import Version

DOCS = Path(__file__).parent.parent / "docs"
BEGIN = "<!-- table of what works -->\n"
END = "<!-- end of the table of what works -->\n"

# For each text the tests that are marked with it, for each test how many marked cases had which
# outcome: "passed", "failed" or "skipped: " and the reason. None where they were only collected.
Rows = dict[str, dict[str, dict[str, int]]]


class Recorder:
    """A pytest plugin that writes the rows when the session ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: dict[str, list[str]] = {}
        self.outcomes: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("works"):
                (text,) = mark.args
                self.cases.setdefault(text, []).append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or hasattr(report, "wasxfail"):
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = (
                f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
            )
        elif report.when == "call":
            self.outcomes[report.nodeid] = "passed"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        rows: Rows = {}
        for text, cases in self.cases.items():
            tests = rows[text] = {}
            for case in cases:
                outcomes = tests.setdefault(case.split("[")[0], {})
                if case in self.outcomes:
                    outcome = self.outcomes[case]
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1
        version = torch.__version__.split("+")[0]
        recording = {
            "torch": version,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rows": rows,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{version}.json").write_text(json.dumps(recording, indent=1) + "\n")


def read(folder: Path) -> list[dict]:
    """Return the recordings of a folder, the oldest torch first."""
    recordings = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(recordings, key=lambda recording: Version(recording["torch"]))


def marked(rows: Rows) -> set[tuple[str, str]]:
    """Return each text with each of its tests."""
    return {(text, test) for text, tests in rows.items() for test in tests}


def table(recordings: list[dict]) -> str:
    """Return what stands between the markers.

    Raises:
        ValueError: The recordings are not of the same tests, or some did not run.
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


def replaced(document: str, text: str) -> str:
    """Return the document with the text between its markers.

    Raises:
        ValueError: A marker is missing.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r}")
    return before + begin + text + end + after


def main() -> None:
    """Rewrite the document in place."""
    document = DOCS / "pytorch2.md"
    document.write_text(replaced(document.read_text(), table(read(DOCS / "works"))))


if __name__ == "__main__":
    main()
