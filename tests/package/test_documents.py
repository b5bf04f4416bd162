"""The generated tables: failures, troubles and features of each torch."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from support.paths import ROOT

from tools import documents

pytestmark = pytest.mark.any_torch

TESTS = ROOT / "tests"
VERSION = torch.__version__.split("+")[0]
DOCUMENT = "before\n<!-- sums -->\nold\n<!-- end of sums -->\nafter\n"


def test_block_is_replaced_and_nothing_else():
    expected = "before\n<!-- sums -->\nnew\n<!-- end of sums -->\nafter\n"
    assert documents.replace_block(DOCUMENT, "sums", "new\n") == expected


@pytest.mark.parametrize("marker", ["<!-- sums -->\n", "<!-- end of sums -->\n"])
def test_missing_marker_is_an_error(marker):
    with pytest.raises(ValueError, match="expected the lines '<!-- sums -->"):
        documents.replace_block(DOCUMENT.replace(marker, ""), "sums", "new\n")


@pytest.mark.parametrize(("document", "block"), documents.BLOCKS)
def test_table_is_the_generated_one(document, block):
    text = (documents.DOCS / document).read_text()
    generated = documents.BLOCKS[document, block]()
    assert documents.replace_block(text, block, generated) == text, (
        "run `python -m tools.documents`"
    )


TROUBLES = documents.find_troubles(TESTS)


def test_every_trouble_is_in_a_table():
    text = (documents.DOCS / "troubleshooting.md").read_text()
    assert len(TROUBLES) > 15
    for trouble in TROUBLES:
        assert trouble.symptom in text, trouble.path


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.symptom[:30])
def test_quoted_message_is_in_the_file_of_its_test(trouble):
    text = ast.unparse(ast.parse(trouble.path.read_text()))
    for words in re.findall("“(.*?)”", trouble.symptom):
        assert text.count(words) > 1, words  # in the mark, and in the test


def record(folder, *arguments, **options):
    """Return the recording of a run of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", f"--works={folder}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return json.loads((folder / f"{VERSION}.json").read_text())


def test_recordings_are_of_the_tests_that_are_marked(tmp_path):
    collected = record(tmp_path, "--collect-only", "-m", "works", cwd=TESTS.parent)
    expected = documents.marked(collected["rows"])
    for recording in documents.read_recordings(documents.DOCS / "works"):
        assert documents.marked(recording["rows"]) == expected, f"run `{documents.COMMAND}`"


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


def test_table_shows_the_outcomes_of_the_tests(sample):
    other = {**sample, "torch": "9.10.0"}
    head, _, *rows = [line.split(" | ") for line in documents.works([sample, other]).splitlines()]
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
    assert rows["passing"][2] == "[test_passes](../../test_sample.py) |"


def test_recordings_of_different_or_unrun_tests_are_refused(sample):
    other = {**sample, "rows": {text: sample["rows"][text] for text in ("passing", "both")}}
    with pytest.raises(ValueError, match="expected recordings of the same tests, .*'failing'"):
        documents.works([sample, other])
    unrun = {**sample, "rows": {"passing": {"test_sample.py::test_passes": {}}}}
    with pytest.raises(ValueError, match="expected that test_sample.py::test_passes was run"):
        documents.works([unrun])


def test_versions_are_sorted_by_number(tmp_path):
    for version in ("2.11.0", "2.9.1"):
        (tmp_path / f"{version}.json").write_text(json.dumps({"torch": version}))
    assert [r["torch"] for r in documents.read_recordings(tmp_path)] == ["2.9.1", "2.11.0"]
