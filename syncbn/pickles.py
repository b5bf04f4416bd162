"""Pickles of our objects, which later versions can load, too."""

from collections.abc import Callable
from typing import Any

# By kind, the functions that rebuild the objects of a pickle. Other modules add theirs.
RECONSTRUCTIONS: dict[str, Callable[..., Any]] = {}


def _reconstruct(kind: str, *arguments: Any) -> Any:
    """Rebuild an object of a pickle: the only private name of syncbn that pickles hold.

    A kind and its arguments are never changed, because files hold them: tests/data has one of each.
    """
    if kind not in RECONSTRUCTIONS:
        raise ValueError(
            f"this version of syncbn cannot load an object of kind {kind!r}; load the file with "
            "the version that wrote it, or save a state_dict"
        )
    return RECONSTRUCTIONS[kind](*arguments)


_reconstruct.__module__ = "syncbn"  # its path in pickles
