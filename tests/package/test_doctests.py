"""The examples in the public docstrings run, and print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name", ["functional", "modules", "convert", "frozen", "statistics", "synchrony"]
)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"syncbn.{name}")
    results = doctest.testmod(module, extraglobs={"__name__": "__doctest__"})
    assert results.attempted > 0 and results.failed == 0
