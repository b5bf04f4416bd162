"""The project's addresses: the entries of ``[project.urls]`` in pyproject.toml.

Parsed by a regular expression, because Python 3.10 has no TOML parser.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def url(name: str = "Repository") -> str:
    """Return the address of an entry.

    Raises:
        ValueError: pyproject.toml has no such line.
    """
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'^{name} = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError(f'expected a line {name} = "https://..." in pyproject.toml')
    return found[1]
