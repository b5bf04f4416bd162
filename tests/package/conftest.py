import pytest


@pytest.fixture(autouse=True)
def warnings_are_errors(monkeypatch):
    """In programs that tests start, the warnings that Python shows by default."""
    monkeypatch.setenv("PYTHONWARNINGS", "error,ignore::DeprecationWarning")
