"""The examples in the public docstrings run, and print the shown output."""

import doctest

import pytest

import syncbn


@pytest.mark.parametrize("name", syncbn.__all__)
def test_examples_in_docstrings(name):
    tests = doctest.DocTestFinder().find(getattr(syncbn, name), name, globs={})
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
