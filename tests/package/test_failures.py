"""The tables of failures and of troubles are generated, of what is tested."""

import ast
import re

import pytest
from support.paths import ROOT

from tools import failures, troubleshooting
from tools.generated_block import replace_block


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("tool", "table"),
    [(failures, failures.table), (troubleshooting, troubleshooting.tables)],
    ids=["failures", "troubleshooting"],
)
def test_table_is_the_generated_one(tool, table):
    document = tool.DOCUMENT.read_text()
    assert replace_block(document, tool.BLOCK, table()) == document, (
        f"run `python -m {tool.__name__}`"
    )


TROUBLES = troubleshooting.troubles(ROOT / "tests")


@pytest.mark.any_torch
def test_every_trouble_is_in_a_table():
    document = troubleshooting.DOCUMENT.read_text()
    assert len(TROUBLES) > 15
    for trouble in TROUBLES:
        assert trouble.symptom in document, trouble.path


@pytest.mark.any_torch
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.symptom[:30])
def test_quoted_message_is_in_the_file_of_its_test(trouble):
    text = ast.unparse(ast.parse(trouble.path.read_text()))
    for words in re.findall("“(.*?)”", trouble.symptom):
        assert text.count(words) > 1, words  # in the mark, and in the test
