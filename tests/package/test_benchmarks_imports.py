"""What benchmarks import: the installed package, and no more than a command needs."""

import os

import pytest
from support.benchmarking import execute, step_rows
from support.paths import ROOT

from benchmarks.cases import SUITES
from benchmarks.rows import write

pytestmark = pytest.mark.any_torch


@pytest.fixture
def installed(tmp_path):
    """A folder before the project's, as site-packages are: with another syncbn, which says so."""
    (tmp_path / "syncbn").mkdir()
    (tmp_path / "syncbn/__init__.py").write_text("raise SystemExit('the installed one')")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "benchmarks", "run", "--tiny"),
        ("-m", "benchmarks.timings"),
        ("-m", "benchmarks.cuda_timings"),
        ("-c", "import benchmarks, syncbn"),
    ],
)
def test_installed_package_is_measured_and_not_the_folder_of_its_sources(installed, command):
    assert execute(*command, PYTHONPATH=str(installed)).stderr == "the installed one\n"


FIND = """
import benchmarks, sys
from importlib.util import find_spec
print(find_spec("syncbn").origin, sys.path[-1])
"""


def test_sources_are_measured_where_they_are_asked_for(installed):
    """As by `make gpu-check`, which builds in place."""
    result = execute("-c", FIND, PYTHONPATH=f"{ROOT}{os.pathsep}{installed}")
    assert result.stdout.split()[0] == str(ROOT / "syncbn/__init__.py"), result.stderr


def test_sources_are_found_where_nothing_is_installed():
    # Without site-packages, where torch lies, too.
    result = execute("-S", "-c", FIND, PYTHONPATH="")
    assert result.stdout.split() == [str(ROOT / "syncbn/__init__.py"), str(ROOT)], result.stderr


def without(*modules):
    """Return a program that cannot import these."""
    return f"""
import benchmarks, sys
sys.modules.update(dict.fromkeys({modules}))
"""


@pytest.mark.parametrize("command", ["table", "compare"])
def test_results_are_read_with_nothing_but_python(tmp_path, command):
    results = tmp_path / "abacus.csv"
    (tmp_path / "benchmarks").mkdir()
    for name in ("README.md", "benchmarks/README.md"):
        (tmp_path / name).write_text("<!-- benchmark table -->\n<!-- end of benchmark table -->\n")
    write(results, step_rows(SUITES["tiny"].cases[0], 1.0))
    args = {"table": ("--root", tmp_path, "--results", tmp_path), "compare": (results, results)}
    code = without("torch", "syncbn", "numpy", "matplotlib")
    code += "from benchmarks.__main__ import main; main()"
    result = execute("-c", code, command, *args[command])
    assert result.returncode == 0, result.stderr


def test_gpus_are_timed_without_numpy_and_matplotlib():
    """A machine with a GPU may have no more than torch."""
    code = "import benchmarks, syncbn" + without("numpy", "matplotlib")
    result = execute("-c", code + "import benchmarks.cuda_timings")
    assert result.returncode == 0, result.stderr
