"""Releases: the checks of wheels, the sdist and its metadata, cibuildwheel's settings."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

import syncbn
from tools import release, wheels

pytestmark = pytest.mark.any_torch

PYTHONS = (10, 11, 12, 13, 14)  # minor versions with a wheel
PACKAGE = Path(syncbn.__file__).parent
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
TAG = f"{PYTHON}-{PYTHON}-linux_x86_64"
NAME = f"syncbn-{release.version()}-{TAG}.whl"
INFO = f"syncbn-{release.version()}.dist-info"
METADATA = f"""Metadata-Version: 2.1
Name: syncbn
Version: {release.version()}
Summary: Words
Description-Content-Type: text/markdown

# syncbn
"""
WHEEL = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {TAG}\n"


def write_wheel(folder, changes=(), name=NAME):
    """Write a wheel of the installed package; ``changes`` maps files to new contents or None."""
    files = {
        f"syncbn/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes()
        for path in (*PACKAGE.rglob("*.py"), *PACKAGE.glob("*.pyi"), *PACKAGE.glob("*.so"))
        if path.is_file()
    }
    files |= {"syncbn/py.typed": b"", f"{INFO}/METADATA": METADATA, f"{INFO}/WHEEL": WHEEL}
    files |= dict(changes)
    files = {path: content for path, content in files.items() if content is not None}
    files[f"{INFO}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{INFO}/RECORD"))
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
    return folder / name


def test_a_wheel_of_the_installed_package_passes(tmp_path):
    assert wheels.problems(write_wheel(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"syncbn/py.typed": None}, "expected syncbn/py.typed in"),
        ({"syncbn/modules.py": None}, "expected syncbn/modules.py in"),
        ({"tests/conftest.py": b"pass\n"}, "W005"),
        ({f"{INFO}/METADATA": METADATA[:-10]}, "long_description"),
        (
            {f"{INFO}/METADATA": METADATA + "[a](docs/a.md)"},
            "in the description, but got docs/a.md",
        ),
    ],
)
def test_faulty_wheel_is_refused(tmp_path, changes, words):
    (problem,) = wheels.problems(write_wheel(tmp_path, changes))
    assert words in problem


def test_library_that_needs_one_torch_is_refused(tmp_path):
    """Such as one of torch's own, written against the ABI that each torch changes."""
    library = Path(torch.__file__).parent / "lib" / "libshm.so"
    changes = {"syncbn/_other.so": library.read_bytes()}
    problems = wheels.problems(write_wheel(tmp_path, changes))
    assert any("UNSTABLE" in problem for problem in problems), problems


def test_library_for_another_python_is_refused(tmp_path):
    name = NAME.replace(PYTHON, "cp39")
    (problem,) = wheels.problems(write_wheel(tmp_path, name=name))
    assert "expected syncbn/_C.cpython-39-x86_64-linux-gnu.so in" in problem


def test_wheel_name_without_a_python_is_refused(tmp_path):
    name = NAME.replace(f"{PYTHON}-{PYTHON}", "py3-none")
    assert any(
        "SYSTEM.whl, but got" in p for p in wheels.problems(write_wheel(tmp_path, name=name))
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", f"--outdir={folder}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def metadata(sdist):
    """Metadata of wheels is the same: setup.py writes both."""
    with tarfile.open(sdist) as file:
        return file.extractfile(f"syncbn-{release.version()}/PKG-INFO").read().decode()


def test_sdist_holds_the_files_of_git(sdist):
    """So that it builds the same from a folder without git."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a git checkout")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    with tarfile.open(sdist) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    assert held >= set(listed) - {".gitignore"}
    assert not [name for name in held if name.endswith(".so")]


def test_pypi_takes_the_metadata(sdist):
    passed, printed = wheels.run("twine", "check", "--strict", str(sdist))
    assert passed, printed


def test_description_is_the_readme_with_links_to_files_of_this_version(metadata):
    assert wheels.relative_links(metadata) == []
    files = rf"{re.escape(release.url())}/(?:blob|raw)/v{re.escape(release.version())}/"
    linked = re.findall(rf"\({files}([^)#]+)", metadata)
    assert len(linked) > 10
    assert not [path for path in linked if not (ROOT / path).exists()]
    assert f"]({release.url()}/raw/v{release.version()}/docs/digits.png)" in metadata
    description = metadata.partition("\n\n")[2]
    assert re.sub(files, "", description).strip() == (ROOT / "README.md").read_text().strip()


def test_metadata_names_license_links_and_pythons(metadata):
    headers = email.message_from_string(metadata)
    assert headers["License-Expression"] == "BSD-3-Clause" and headers["Author"]
    urls = dict(line.split(", ") for line in headers.get_all("Project-URL"))
    assert urls.keys() == {"Changelog", "Documentation", "Issues", "Repository"}
    assert urls["Repository"] == release.url()
    assert all(urls[name].startswith(release.url()) for name in ("Changelog", "Issues"))
    classifiers = headers.get_all("Classifier")
    pythons = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", c) for c in classifiers]
    assert tuple(int(python[1]) for python in pythons if python) == PYTHONS
    assert "Environment :: GPU :: NVIDIA CUDA" in classifiers


def test_cibuildwheel_reads_its_settings():
    """It builds a wheel for each Python that syncbn is for."""
    command = [Path(sys.executable).parent / "cibuildwheel", "--print-build-identifiers"]
    result = subprocess.run(
        [*command, "--platform=linux"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [f"cp3{minor}-manylinux_x86_64" for minor in PYTHONS]
