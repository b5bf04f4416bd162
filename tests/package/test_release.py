"""One place for the version, the needs of a release, and pinned tools."""

import re
from importlib import metadata

import pytest
import tomllib
from support.paths import ROOT

import syncbn
from tools import release

pytestmark = pytest.mark.any_torch

DATED = f"# Changelog\n\n## [Unreleased]\n\n## [{release.version()}] - 2026-12-01\n\n- All.\n"
CITATION = "title: syncbn\ndate-released: 2026-12-01\nlicense: BSD-3-Clause\n"
TAG = f"v{release.version()}"


def test_version_is_that_of_setup_py():
    assert syncbn.__version__ == release.version()
    assert re.fullmatch(r"\d+\.\d+\.\d+", syncbn.__version__)


def test_version_is_in_one_place():
    """Except documents, and results, which name their version. The citation has the same."""
    found = [
        path.name
        for pattern in ("*.py", "*.toml", "*.cff", "syncbn/**/*.py", "csrc/**/*.*", "tools/*.py")
        for path in ROOT.glob(pattern)
        if re.search(rf"(?<![\d.]){re.escape(release.version())}(?![\d.])", path.read_text())
    ]
    assert found == ["setup.py", "CITATION.cff"]
    assert f"\nversion: {release.version()}\n" in (ROOT / "CITATION.cff").read_text()


def test_changelog_has_the_version():
    assert f"## [{release.version()}]" in (ROOT / "CHANGELOG.md").read_text()


def test_a_release_that_is_ready_has_no_problems():
    assert release.problems(TAG, release.url(), DATED, CITATION) == []


@pytest.mark.parametrize(
    ("tag", "address", "changelog", "words"),
    [
        ("v9.9.9", release.url(), DATED, "expected the tag"),
        (release.version(), release.url(), DATED, "expected the tag"),
        (TAG, "https://github.com/somebody/else", DATED, "expected the repository"),
        (TAG, release.url(), DATED.replace("2026-12-01", "soon"), "YYYY-MM-DD"),
        (TAG, release.url(), DATED.replace(release.version(), "0.0.1"), "YYYY-MM-DD"),
        (TAG, release.url(), DATED.replace("2026-12-01", "2026-12-02"), "in CITATION.cff"),
    ],
)
def test_problems_of_an_unready_release_are_reported(tag, address, changelog, words):
    (problem,) = release.problems(tag, address, changelog, CITATION)
    assert words in problem


def test_torch_is_all_that_is_needed_at_run_time():
    assert metadata.requires("syncbn") == ["torch>=2.11"]


def test_tools_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = [tool for group in project["dependency-groups"].values() for tool in group]
    pinned = re.compile(r"[\w.\[\]-]+==[\w.]+(; python_version .+)?")
    assert [tool for tool in tools if not pinned.fullmatch(tool)] == ["torchvision"]


@pytest.mark.parametrize("group", ["release", "wheel-build", "wheel-test"])
def test_a_release_installs_hashed_files_of_the_pinned_tools(group):
    hashed = (ROOT / f"tools/requirements/{group}.txt").read_text()
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for pin in groups["wheels" if group == "release" else group]:
        assert f"\n{pin.partition(';')[0]} " in hashed, (
            f"expected {pin}; run `make -f tools/maintain.mk requirements`"
        )
    for requirement in re.findall(r"^\w.*\n.*", hashed, re.MULTILINE):
        assert "==" in requirement and "--hash=sha256:" in requirement, requirement
