"""The address of the project's repository: the entry ``Repository`` in pyproject.toml.

Parsed by a regular expression, because Python 3.10 has no TOML parser.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def url() -> str:
    """Return the address of the repository's page.

    Raises:
        ValueError: pyproject.toml has no such line.
    """
    found = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError('expected a line Repository = "https://..." in pyproject.toml')
    return found[1]
