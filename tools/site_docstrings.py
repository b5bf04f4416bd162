"""Converts docstrings for the site: an extension of griffe, the parser of mkdocstrings.

In the sources a reference is Sphinx's ``:class:`syncbn.SyncBatchNorm```, and the heading of an
example is "Example:".
"""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth):`(\w[\w.]*)`")


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
