"""A build without the packages that it needs: the first lines of the error say what to do."""

import subprocess
import sys

import pytest
from support.paths import ROOT

TOOLS = 'pip install torch ninja "setuptools>=77.0.3,<82"'


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment, with the pip of the tests' environment."""
    folder = tmp_path_factory.mktemp("new") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def install(environment, versions):
    """Install syncbn where metadata names these versions of packages."""
    (packages,) = environment.glob("lib/python*/site-packages")
    for name in ("setuptools", "torch"):
        folder = packages / f"{name}-0.dist-info"
        folder.mkdir(exist_ok=True)
        metadata = folder / "METADATA"
        metadata.unlink(missing_ok=True)
        if name in versions:
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {versions[name]}\n")
        else:
            folder.rmdir()
    command = ["pip", "--python", environment, "install", "--no-build-isolation", "--no-deps", ROOT]
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)


@pytest.mark.any_torch
@pytest.mark.trouble(
    "“needs setuptools 77.0.3 or later to be built”",
    "`--no-build-isolation` builds with the installed packages; one is missing or too old",
    '`pip install torch ninja "setuptools>=77.0.3,<82"`',
)
@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, "needs setuptools 77.0.3 or later to be built, but it is not installed"),
        ({"setuptools": "65.5.0"}, "77.0.3 or later to be built, but found setuptools 65.5.0"),
        (
            {"setuptools": "81.0.0"},
            "needs torch 2.11 or later to be built, but it is not installed",
        ),
        (
            {"setuptools": "81.0.0", "torch": "2.10.1+cpu"},
            "needs torch 2.11 or later to be built, but found torch 2.10.1+cpu",
        ),
    ],
    ids=["uv or Python 3.12", "Python 3.11", "no torch", "old torch"],
)
def test_missing_package_is_named_with_the_way_out(environment, versions, words):
    result = install(environment, versions)
    assert result.returncode != 0
    lines = [line.strip() for line in result.stderr.splitlines()]
    (first,) = [i for i, line in enumerate(lines) if line.startswith("syncbn needs")]
    assert words in lines[first] and lines[first + 1] == TOOLS
    assert "Traceback" not in result.stderr


@pytest.mark.any_torch
def test_too_old_python_is_named():
    script = (
        "import runpy, sys; sys.version_info = (3, 9, 18, 'final', 0); "
        "runpy.run_path('tools/backend/syncbn_backend.py')"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1
    words = "syncbn needs Python 3.10 or later, but found Python 3.9.18."
    assert result.stderr.startswith(words)
