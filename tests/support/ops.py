"""The operators as functions: with a mask by name, and with errors in their classes."""

import contextlib
from unittest import mock

import syncbn.ops
from syncbn.ops import *  # noqa: F403
from syncbn.ops import Operators, around, batch_norm, in_its_class


def _as_function(name):
    def call(*operands, mask=None):
        try:
            return getattr(around(mask), name)(*operands)
        except RuntimeError as error:
            raise in_its_class(error) from None

    return call


for _name in Operators._fields:
    globals()[_name] = _as_function(_name)


@contextlib.contextmanager
def replaced(**functions):
    """Let layers call other functions in the place of operators of these names."""
    usual = {name: call for name, call in functions.items() if name in Operators._fields}
    with (
        mock.patch.dict(batch_norm._OVERLOADS, functions),
        mock.patch.object(syncbn.ops, "usual", syncbn.ops.usual._replace(**usual)),
    ):
        yield
