"""Hooks of the documentation site, which mkdocs.yml names: pages that are made when it is built.

README, CONTRIBUTING and CHANGELOG become pages, and so do the results of the benchmarks. Links are
written as GitHub resolves them, by the place of the file in the repository: they lead to the page,
or, of a file that is no page, to the repository. The build fails where a public name is not on the
API page, or is there without a docstring.
"""

import io
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

from benchmarks import plot, rows, steps, table  # noqa: E402
from tools import repository  # noqa: E402

# Pages made of files outside of docs/.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")

BENCHMARKS = """# Benchmarks

All that `make bench` measured of single layers, drawn from the files of results when this page was
built. Other rows of the files are operators, accuracy and the projected cost of communication.

"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Tell the theme where the repository is."""
    config.repo_url = repository.url()
    config.repo_name = "Repository"
    config.edit_uri = ""
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and check the API page."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "benchmarks.md", content=_benchmarks(config, files)))
    api = (Path(config.docs_dir) / "api.md").read_text()
    problems = undocumented(ROOT, re.findall(r"^::: syncbn\.(\w+)$", api, re.MULTILINE))
    if problems:
        raise PluginError("\n".join(problems))
    return files


def _benchmarks(config: MkDocsConfig, files: Files) -> str:
    """Return the page of the benchmarks, and add its pictures."""
    text = BENCHMARKS
    for path in sorted(rows.RESULTS.glob("*.csv")):
        results = rows.read(path)
        cases = tuple(dict.fromkeys(map(steps.case_name, steps.training_steps(results))))
        drawn = io.BytesIO()
        plot.picture(results).savefig(drawn, format="png")
        picture = f"benchmarks-{path.stem}.png"
        files.append(File.generated(config, picture, content=drawn.getvalue()))
        text += f"## {path.stem}\n\n{table.text([results], cases)}\n"
        text += f"![The table above as a picture, and how fast copying is.]({picture})\n"
    return text


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Turn links between files of the repository into links between pages, or to the repository."""
    if page.parent is None:  # alone under its tab: no list of pages beside it
        page.meta["hide"] = ["navigation"]
    made = {page: source for source, page in PAGES.items()} | {"benchmarks.md": "benchmarks.md"}
    source = made.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return rewritten(markdown, source, {file.src_uri for file in files})


def rewritten(markdown: str, source: str, pages: set[str]) -> str:
    """Return the text of ``source``, a path in the repository, with its links as the site has them.

    A link to what is neither a page nor a file stays, for MkDocs to complain of.
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
    """Return what is wrong with the public names of the package in ``root``, in words.

    Args:
        root: The folder that syncbn lies in.
        on_page: The names that the API page shows.
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
