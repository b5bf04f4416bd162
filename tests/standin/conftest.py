import ctypes
from pathlib import Path

import pytest


def is_preloaded() -> bool:
    return hasattr(ctypes.CDLL(None), "standin_take_log")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.standin)
            if not is_preloaded():
                item.add_marker(pytest.mark.skip(reason="not on the stand-in: `make standin`"))
