"""Checks a tag before release: ``python -m tools.release TAG ADDRESS_OF_ITS_REPOSITORY``.

Prints the problems, and exits with status 1 if there are any. Needs only Python.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """Return the version, read from setup.py."""
    (found,) = re.findall(r'^VERSION = "(.+)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    return str(found)


def url(name: str = "Repository") -> str:
    """Return an address of ``[project.urls]`` in pyproject.toml.

    It is found by a regular expression, because Python 3.10 has no TOML parser.

    Raises:
        ValueError: pyproject.toml has no such line.
    """
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'^{name} = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError(f'expected a line {name} = "https://..." in pyproject.toml')
    return found[1]


def problems(tag: str, address: str, changelog: str, citation: str) -> list[str]:
    """Return the problems that prevent the release of a tag.

    Args:
        tag: The tag, "v" and the version.
        address: The address of the tag's repository.
        changelog: The text of CHANGELOG.md.
        citation: The text of CITATION.cff.
    """
    found = []
    if tag != f"v{version()}":
        found.append(f"expected the tag v{version()}, the version in setup.py, but got {tag}")
    if address != url():
        found.append(f"expected the repository {url()}, as pyproject.toml says, but got {address}")
    headings = re.findall(r"^## \[(.+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    date = dict(headings).get(version())
    if date is None:
        found.append(f"expected a line '## [{version()}] - YYYY-MM-DD' in CHANGELOG.md")
    elif f"\ndate-released: {date}\n" not in citation:
        found.append(
            f"expected the line 'date-released: {date}' in CITATION.cff, as in CHANGELOG.md"
        )
    return found


def main() -> None:
    """Check the arguments: a tag and the address of its repository."""
    tag, address = sys.argv[1:]
    texts = [(ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff")]
    found = problems(tag, address, *texts)
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
