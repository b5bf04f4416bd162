"""Records the outcomes of the tests marked ``works(text)``: ``pytest --works=FOLDER``."""

import datetime
import json
import platform
from pathlib import Path

import pytest
import torch

from tools.documents import Rows


class Recorder:
    """A pytest plugin that writes the rows at the end of the session."""

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
