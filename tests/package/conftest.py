import pytest


@pytest.fixture(autouse=True)
def warnings_are_errors(monkeypatch):
    """In programs that tests start, the warnings that Python shows by default."""
    monkeypatch.setenv("PYTHONWARNINGS", "error,ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def no_make_around(monkeypatch):
    """A make started by a test is not a sub-make of the one that runs the tests."""
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    monkeypatch.delenv("MAKELEVEL", raising=False)
