"""The documentation site: `make docs` builds it, and fails where something in it is wrong."""

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
from benchmarks.results import RESULTS
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
    """What the site is made of, to be broken."""
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


def test_start_page_shows_the_picture_and_the_version(site):
    page = (site / "index.html").read_text()
    (picture,) = re.findall(r'<img[^>]* src="([^"]*digits[^"]*)"', page)
    assert (site / picture).stat().st_size > 10_000
    assert f" - syncbn {syncbn.__version__}</title>" in page


def test_labels_are_titles(site):
    start = (site / "index.html").read_text()
    links = re.findall(r'<a href="([^":]+/)" class="md-nav__link">(.*?)</a>', start, re.DOTALL)
    assert len(links) > 15
    for address, label in links:
        (title,) = re.findall(r"<h1[^>]*>(.*?)<", (site / address / "index.html").read_text())
        assert re.sub(r"<[^>]*>", "", label).strip() == title


ADDRESS = release.url("Documentation")


def test_pages_know_their_address(site):
    addresses = re.findall("<loc>(.*)</loc>", (site / "sitemap.xml").read_text())
    assert len(addresses) > 15
    for address in addresses:
        assert address.startswith(ADDRESS)
        page = site / address.removeprefix(ADDRESS) / "index.html"
        assert f'<link rel="canonical" href="{address}">' in page.read_text()


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


def test_page_of_the_benchmarks_shows_its_tables_and_pictures(site):
    page = (site / "benchmarks/index.html").read_text()
    for path in RESULTS.glob("[!s]*.csv"):  # whole steps are in the README
        assert f'id="{path.stem}"' in page
        assert f'src="results/{path.stem}.png"' in page
        assert (site / f"benchmarks/results/{path.stem}.png").stat().st_size > 10_000


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(
            r'<(?:script|img|link rel="(?!canonical))[^>]*(?:src|href)="(http[^"]*)', text
        )
        assert fetched == [], page
        assert 'data-md-component="source"' not in text  # Material's program asks GitHub for it


WRONG = [  # in which file, what, and the words of the complaint
    ("docs/statistics.md", "[gone](gone.md)", "'gone.md', but the target is not found"),
    ("docs/statistics.md", "[gone](../tests/gone.py)", "'../tests/gone.py', but the target"),
    ("docs/statistics.md", "[gone](fusion.md#gone)", "does not contain an anchor '#gone'"),
    ("CONTRIBUTING.md", "[gone](docs/gone.md)", "'docs/gone.md', but the target is not found"),
    ("docs/new.md", "# Not in the navigation", "new.md"),
]


def append(path, text):
    with path.open("a") as file:
        file.write(f"\n\n{text}\n")


def test_what_is_wrong_in_pages_fails_the_build(checkout):
    for path, text, _ in WRONG:
        append(checkout / path, text)
    result = build(checkout, checkout / "site")
    assert result.returncode != 0
    for _, _, words in WRONG:
        assert words in result.stderr, result.stderr
    assert result.stderr.count("WARNING") == len(WRONG), result.stderr


def test_what_is_wrong_in_the_api_page_fails_the_build(checkout):
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


def test_references_of_docstrings_become_links():
    text = (
        "As :func:`syncbn.functional.train`, not :class:`torch.nn.Linear`.\n\nExample:\n    >>> 1\n"
    )
    assert site_hooks.to_markdown(text) == (
        "As [`syncbn.functional.train`][syncbn.functional.train], not `torch.nn.Linear`.\n\n"
        "Examples:\n    >>> 1\n"
    )
