"""The documentation site: `make docs` builds it, and fails if a part is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.paths import ROOT

import syncbn
from tools import release, site_hooks

pytestmark = pytest.mark.any_torch


def build(folder, output):
    """Build the site of a checkout."""
    command = [Path(sys.executable).parent / "mkdocs", "build", f"--site-dir={output}"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A copy of the site's sources, which tests break."""
    for name in ("benchmarks", "docs", "syncbn", "tools"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    for name in (".ci", "csrc", "examples", "setup.py", "tests", "CITATION.cff", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_every_public_name_is_on_the_api_page_first_in_a_table(site):
    page = (site / "api/index.html").read_text()
    table, _, _ = page.partition("</table>")
    for name in syncbn.__all__:
        assert f'id="syncbn.{name}"' in page, name
        assert f'href="#syncbn.{name}"' in table, name
    assert "extra_repr" not in page


ADDRESS = release.url("Documentation")


def test_page_of_missing_addresses_works_in_each_folder(site):
    links = re.findall(r'(?:href|src)="([^"#]+)"', (site / "404.html").read_text())
    own = [link for link in links if not urlsplit(link).netloc]
    assert len(own) > 15
    for link in own:
        folder = urlsplit(ADDRESS).path
        assert link.startswith(folder) and (site / link.removeprefix(folder)).exists(), link


@pytest.mark.parametrize(
    ("words", "page"),
    [
        *((words, "troubleshooting/") for words in ("hang", "stuck", "deadlock", "freeze", "NaN")),
        ("out of memory", "troubleshooting/"),
        ("uninstall", "install/"),
        ("Windows", "install/"),
        ("convert", "api/"),
    ],
)
def test_search_finds_words_of_users(site, words, page):
    sections = json.loads((site / "search/search_index.json").read_text())["docs"]
    found = {
        section["location"].partition("#")[0]
        for section in sections
        if re.search(rf"\b{words}(?!_)", section["title"] + section["text"], re.IGNORECASE)
    }
    assert page in found


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(
            r'<(?:script|img|link rel="(?!canonical))[^>]*(?:src|href)="(http[^"]*)', text
        )
        assert fetched == [], page
        assert 'data-md-component="source"' not in text  # Material's script queries GitHub


def append(path, text):
    with path.open("a") as file:
        file.write(f"\n\n{text}\n")


def test_faulty_api_page_fails_the_build(checkout):
    append(checkout / "docs/api.md", "::: syncbn.gone")
    result = build(checkout, checkout / "site")
    assert result.returncode != 0 and "gone, which is not public" in result.stderr, result.stderr


def test_public_name_must_be_on_the_page_and_documented(tmp_path):
    (tmp_path / "syncbn").mkdir()
    (tmp_path / "syncbn/__init__.py").write_text(
        "from syncbn.layers import Layer, bare, documented, forgotten\n"
        "__all__ = ['Layer', 'bare', 'documented', 'forgotten']\n"
    )
    (tmp_path / "syncbn/layers.py").write_text(
        "class Layer:\n"
        "    '''A layer.'''\n"
        "    def __init__(self): pass\n"
        "    def _private(self): pass\n"
        "    def forward(self): pass\n"
        "def bare(): pass\n"
        "def documented(): '''Words.'''\n"
        "def forgotten(): '''Words.'''\n"
    )
    assert site_hooks.undocumented(tmp_path, ["Layer", "bare", "documented", "other"]) == [
        "forgotten is public, and not on the page docs/api.md",
        "docs/api.md shows other, which is not public",
        "syncbn.layers.Layer.forward is public, and has no docstring",
        "syncbn.layers.bare is public, and has no docstring",
    ]


FILES = release.url() + "/blob/main"


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "docs/statistics.md", "statistics.md"),
        ("README.md", "docs/statistics.md#an-example", "statistics.md#an-example"),
        ("README.md", "CONTRIBUTING.md", "contributing.md"),
        ("README.md", "docs/digits.png", "digits.png"),
        ("README.md", "tests/conftest.py", f"{FILES}/tests/conftest.py"),
        ("README.md", "examples", f"{release.url()}/tree/main/examples"),
        ("docs/statistics.md", "../README.md#install", f"{FILES}/README.md#install"),
        ("docs/tutorial.md", "../examples/resnet18.py", "resnet18.md"),
        ("docs/statistics.md", "fusion.md", "fusion.md"),
        ("docs/statistics.md", "../tests/conftest.py", f"{FILES}/tests/conftest.py"),
        ("docs/statistics.md", "../tests/gone.py", "../tests/gone.py"),
        ("docs/statistics.md", "https://pytorch.org", "https://pytorch.org"),
        ("docs/statistics.md", "#an-example", "#an-example"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository(source, link, expected):
    pages = {"statistics.md", "contributing.md", "fusion.md", "resnet18.md", "digits.png"}
    assert site_hooks.rewritten(f"a [link\nof words]({link}), and", source, pages) == (
        f"a [link\nof words]({expected}), and"
    )
