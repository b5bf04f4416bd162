"""Hooks of mkdocs.yml that generate pages of the documentation site.

README, CONTRIBUTING, CHANGELOG and the README of benchmarks/ become pages. Links in the sources are
relative paths in the repository; they become links to pages or, for other files, to the repository.
The build fails if a public name is missing on the API page or has no docstring.
"""

import posixpath
import re
import sys
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # mkdocs runs this as a file

from tools import repository  # noqa: E402

# Pages from files outside of docs/.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
PICTURES = "benchmarks/results"
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the address of the repository."""
    config.repo_url = repository.url()
    config.repo_name = "Repository"
    config.edit_uri = ""
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and check the API page."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path in (ROOT / PICTURES).glob("*.png"):
        files.append(File.generated(config, f"{PICTURES}/{path.name}", content=path.read_bytes()))
    api = (Path(config.docs_dir) / "api.md").read_text()
    problems = undocumented(ROOT, re.findall(r"^::: syncbn\.(\w+)$", api, re.MULTILINE))
    if problems:
        raise PluginError("\n".join(problems))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Rewrite links between files of the repository."""
    if page.parent is None:  # the only page of its tab needs no list of pages
        page.meta["hide"] = ["navigation"]
    made = {page: source for source, page in PAGES.items()}
    source = made.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return rewritten(markdown, source, {file.src_uri for file in files})


def rewritten(markdown: str, source: str, pages: set[str]) -> str:
    """Return the text of the file ``source`` with links to pages or to the repository.

    A link to a missing file stays unchanged, so that MkDocs reports it.
    """

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = PAGES.get(path, path.removeprefix("docs/"))
        if page in pages:
            return f"]({page}{anchor})"
        if (ROOT / path).exists():
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"]({repository.url()}/{kind}/main/{path}{anchor})"
        return match[0]

    return LINK.sub(link, markdown)


def undocumented(root: Path, on_page: list[str]) -> list[str]:
    """Return the problems of the documentation of public names.

    Args:
        root: The folder that contains the package syncbn.
        on_page: The names on the API page.
    """
    package = griffe.load("syncbn", search_paths=[root], try_relative_path=False)
    public = [str(name) for name in package.exports or ()]
    problems = [
        f"{name} is public, and not on the page docs/api.md"
        for name in public
        if name not in on_page
    ]
    problems += [
        f"docs/api.md shows {name}, which is not public" for name in on_page if name not in public
    ]
    for name in public:
        shown = package[name].final_target
        methods = [m for m in shown.members.values() if m.is_function and m.name[0] != "_"]
        for item in (shown, *(methods if shown.is_class else ())):
            if not item.has_docstring:
                problems.append(f"{item.path} is public, and has no docstring")
    return problems
