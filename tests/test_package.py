"""The installed package: its binaries, its report for bug reports, its import errors."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import syncbn
from syncbn import collect_env

PACKAGE = Path(syncbn.__file__).parent


def test_libraries_are_abi_stable_from_torch_2_11():
    libraries = sorted(PACKAGE.glob("*.so"))
    assert libraries
    audit = Path(sys.executable).parent / "torch-abi-audit"
    for library in libraries:
        result = subprocess.run(
            [str(audit), "--check", "torch", str(library)],
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_binary_tells_what_it_was_built_for():
    from syncbn._extension import build_info

    assert build_info["version"] == syncbn.__version__
    assert build_info["oldest_torch"] == "2.11"
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def test_collect_env_prints_what_a_bug_report_needs(tmp_path):
    command = [sys.executable, "-m", "syncbn.collect_env"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert printed["syncbn"].strip() == syncbn.__version__
    assert printed["torch"].strip() == torch.__version__
    assert "2.11" in printed["torch ABI"] and "gloo" in printed["distributed"]
    assert printed.keys() == collect_env.collect_env().keys()


def test_typed():
    assert (PACKAGE / "py.typed").exists()


def import_error(tmp_path, prepare):
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{prepare}\nimport syncbn"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    return result.stderr


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "syncbn").mkdir()
    for path in PACKAGE.glob("*.py"):
        (tmp_path / "syncbn" / path.name).write_text(path.read_text())
    return tmp_path


def test_missing_binary_is_an_error_with_the_way_out(sources):
    error = import_error(sources, "")
    assert "compiled operators cannot be loaded" in error
    assert "pip install --no-build-isolation ." in error


def test_too_old_torch_is_an_error_with_the_way_out(sources):
    error = import_error(sources, "import torch; torch.__version__ = '2.10.1'")
    assert "needs torch 2.11 or later, but found torch 2.10.1" in error
    assert "pip install --upgrade torch" in error
