"""Hooks of mkdocs.yml that generate pages of the documentation site.

CONTRIBUTING, CHANGELOG, an example and the README of benchmarks/ become pages. Links in the sources
are relative paths in the repository; they become links to pages or, for other files, to the
repository. The build fails if a public name is missing on the API page or has no docstring.

This file is also an extension of griffe, the parser of mkdocstrings, and converts docstrings: in
the sources a reference is Sphinx's ``:class:`syncbn.SyncBatchNorm```, and the heading of an example
is "Example:".
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # mkdocs runs this as a file

from tools import release  # noqa: E402

# Pages from files outside of docs/.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/resnet18.py": "resnet18.md",
}
PICTURES = "benchmarks/results"
ROLE = re.compile(r":(?:class|func|meth):`(\w[\w.]*)`")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")

EXAMPLE = """# Example: ResNet-18

{}

```{{ .python data-search-exclude }}
{}
```
"""
NAMES = "<!-- table of names -->\n"
SOUGHT = ("from_torch.md", "install.md", "troubleshooting.md")  # come first in a search
SHOWN = re.compile(r"^::: syncbn\.(\w+)$", re.MULTILINE)  # on the API page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the version, and the addresses of the repository and of the site."""
    config.site_name += f" {release.version()}"
    config.repo_url = release.url()
    # `mkdocs serve` has set its own.
    config.site_url = config.site_url or release.url("Documentation")
    config.repo_name = "Repository"
    config.edit_uri = ""
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and check the API page."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            _, documentation, code = text.split('"""', 2)
            text = EXAMPLE.format(documentation.strip(), code.strip())
        files.append(File.generated(config, page, content=text))
    for path in (ROOT / PICTURES).glob("*.png"):
        files.append(File.generated(config, f"{PICTURES}/{path.name}", content=path.read_bytes()))
    api = (Path(config.docs_dir) / "api.md").read_text()
    problems = undocumented(ROOT, SHOWN.findall(api))
    if problems:
        raise PluginError("\n".join(problems))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Rewrite links between files of the repository, and fill in the table of names."""
    if page.file.src_uri in SOUGHT:
        page.meta["search"] = {"boost": 4}
    if page.parent is None:  # the only page of its tab needs no list of pages
        page.meta["hide"] = ["navigation"]
    made = {page: source for source, page in PAGES.items()}
    source = made.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if NAMES in markdown:
        markdown = markdown.replace(NAMES, names(SHOWN.findall(markdown)))
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
            return f"]({release.url()}/{kind}/main/{path}{anchor})"
        return match[0]

    return LINK.sub(link, markdown)


def names(on_page: list[str]) -> str:
    """Return the table of public names, with the first sentence of each docstring."""
    package = griffe.load("syncbn", search_paths=[ROOT], try_relative_path=False)
    rows = ["| name | |\n|---|---|\n"]
    for name in on_page:
        docstring = package[name].final_target.docstring
        first = docstring.value.split("\n\n")[0].replace("\n", " ") if docstring else ""
        rows.append(f"| [`{name}`][syncbn.{name}] | {to_markdown(first)} |\n")
    return "".join(rows)


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


def to_markdown(docstring: str) -> str:
    """Return the docstring with references to syncbn as links and others as code."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[`{name}`][{name}]" if name.startswith("syncbn.") else f"`{name}`"

    return re.sub(r"^Example:$", "Examples:", ROLE.sub(link, docstring), flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
