"""The table of failures is generated, of the faults that are tested."""

from tools import failures
from tools.generated_block import replace_block


def test_table_is_the_generated_one():
    document = failures.DOCUMENT.read_text()
    assert replace_block(document, failures.BLOCK, failures.table()) == document, (
        "run `python -m tools.failures`"
    )
