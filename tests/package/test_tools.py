"""The project's tools: blocks of documents, and the files that clang-tidy sees."""

import pytest
from support.paths import ROOT

from tools import clang_tidy
from tools.generated_block import replace_block

DOCUMENT = "before\n<!-- sums -->\nold\n<!-- end of sums -->\nafter\n"


def test_block_is_replaced_and_nothing_else():
    expected = "before\n<!-- sums -->\nnew\n<!-- end of sums -->\nafter\n"
    assert replace_block(DOCUMENT, "sums", "new\n") == expected


@pytest.mark.parametrize("marker", ["<!-- sums -->\n", "<!-- end of sums -->\n"])
def test_missing_marker_is_an_error(marker):
    with pytest.raises(ValueError, match="expected the lines '<!-- sums -->"):
        replace_block(DOCUMENT.replace(marker, ""), "sums", "new\n")


def test_clang_tidy_sees_every_file():
    suffixes = (".cpp", ".cu")
    folders = (ROOT / "csrc", ROOT / "tests" / "emulation")
    files = {file for folder in folders for file in folder.rglob("*") if file.suffix in suffixes}
    if clang_tidy.cuda_include() is None:
        files -= {*ROOT.glob("csrc/cuda/*.cpp")}
    files -= {ROOT / "csrc/cuda/counters.cu"}  # needs CUDA itself, neither torch nor the emulation
    assert {ROOT / path for path in clang_tidy.commands()} == files
