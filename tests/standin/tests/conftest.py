import ctypes
from pathlib import Path

import pytest

IS_STANDIN = hasattr(ctypes.CDLL(None), "standin_take_log")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.standin)
            if not IS_STANDIN:
                item.add_marker(pytest.mark.skip(reason="not on the stand-in: `make standin`"))
