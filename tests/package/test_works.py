"""The table of what works is generated, of the tests that there are."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support.paths import ROOT

from tools import works
from tools.generated_block import replace_block

pytestmark = pytest.mark.any_torch

TESTS = ROOT / "tests"
VERSION = torch.__version__.split("+")[0]


def record(folder, *arguments, **options):
    """Return what a run of pytest records."""
    command = [sys.executable, "-m", "pytest", "-q", f"--works={folder}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return json.loads((folder / f"{VERSION}.json").read_text())


def test_table_is_the_generated_one():
    document = (works.DOCS / "pytorch2.md").read_text()
    text = works.table(works.read(works.DOCS / "works"))
    assert replace_block(document, works.BLOCK, text) == document


def test_recordings_are_of_the_tests_that_are_marked(tmp_path):
    collected = record(tmp_path, "--collect-only", "-m", "works", cwd=TESTS.parent)
    expected = works.marked(collected["rows"])
    for recording in works.read(works.DOCS / "works"):
        assert works.marked(recording["rows"]) == expected, "run `make works`"


SAMPLE = """
import pytest

@pytest.mark.works("passing")
@pytest.mark.works("both")
@pytest.mark.parametrize("case", "ab[")
def test_passes(case): pass

@pytest.mark.works("both")
@pytest.mark.parametrize("case", "ab")
def test_skips_one(case):
    if case == "a": pytest.skip("no GPU")

@pytest.mark.parametrize("case", [pytest.param("a", marks=pytest.mark.works("case a")), "b"])
def test_has_a_marked_case(case): assert case == "a"

@pytest.mark.works("skipped")
@pytest.mark.skip(reason="no GPU")
def test_skips(): pass

@pytest.fixture
def broken(): raise ValueError

@pytest.mark.works("failing")
@pytest.mark.parametrize("case", "ab")
def test_fails(case): assert case == "a"

@pytest.mark.works("erring")
def test_errs(broken): pass

@pytest.mark.works("expected to fail")
@pytest.mark.xfail
def test_xfails(): assert False

def test_unmarked(): assert False
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    (folder / "test_sample.py").write_text(SAMPLE)
    env = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
    }
    return record(folder, "-p", "conftest", "test_sample.py", cwd=folder, env=env)


def test_outcomes_are_counted(sample):
    assert sample["torch"] == VERSION
    assert {
        (text, test.split("::")[1]): outcomes
        for text, tests in sample["rows"].items()
        for test, outcomes in tests.items()
    } == {
        ("passing", "test_passes"): {"passed": 3},
        ("both", "test_passes"): {"passed": 3},
        ("both", "test_skips_one"): {"skipped: no GPU": 1, "passed": 1},
        ("case a", "test_has_a_marked_case"): {"passed": 1},
        ("skipped", "test_skips"): {"skipped: no GPU": 1},
        ("failing", "test_fails"): {"passed": 1, "failed": 1},
        ("erring", "test_errs"): {"failed": 1},
        ("expected to fail", "test_xfails"): {"failed": 1},
    }


def test_table_says_what_became_of_the_tests(sample):
    other = {**sample, "torch": "9.10.0"}
    head, _, *rows = [line.split(" | ") for line in works.table([sample, other]).splitlines()]
    assert head == ["| what", f"torch {VERSION}", "torch 9.10.0", "tests |"]
    rows = {row[0].removeprefix("| "): row[1:] for row in rows if len(row) == len(head)}
    assert {text: cells[0] for text, cells in rows.items()} == {
        "passing": "works",
        "both": "works, 1 of 5 not tested: no GPU",
        "case a": "works",
        "skipped": "not tested: no GPU",
        "failing": "fails",
        "erring": "fails",
        "expected to fail": "fails",
    }
    assert all(cells[0] == cells[1] for cells in rows.values())
    assert rows["passing"][2] == "[test_passes](../test_sample.py) |"


def test_recordings_of_different_or_unrun_tests_are_refused(sample):
    other = {**sample, "rows": {text: sample["rows"][text] for text in ("passing", "both")}}
    with pytest.raises(ValueError, match="expected recordings of the same tests, .*'failing'"):
        works.table([sample, other])
    unrun = {**sample, "rows": {"passing": {"test_sample.py::test_passes": {}}}}
    with pytest.raises(ValueError, match="expected that test_sample.py::test_passes was run"):
        works.table([unrun])


def test_versions_are_sorted_by_number(tmp_path):
    for version in ("2.11.0", "2.9.1"):
        (tmp_path / f"{version}.json").write_text(json.dumps({"torch": version}))
    assert [r["torch"] for r in works.read(tmp_path)] == ["2.9.1", "2.11.0"]
