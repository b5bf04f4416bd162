"""The files that clang-tidy sees."""

from support.paths import ROOT

from tools import clang_tidy


def test_clang_tidy_sees_every_file():
    suffixes = (".cpp", ".cu")
    folders = (ROOT / "csrc", ROOT / "tests" / "emulation")
    files = {file for folder in folders for file in folder.rglob("*") if file.suffix in suffixes}
    if clang_tidy.cuda_include() is None:
        files -= {*ROOT.glob("csrc/cuda/*.cpp")}
    files -= {ROOT / "csrc/cuda/counters.cu"}  # needs CUDA itself, neither torch nor the emulation
    assert {ROOT / path for path in clang_tidy.commands()} == files
