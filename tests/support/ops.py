"""The operators as functions: with a mask by name, and with errors in their classes."""

import contextlib
import functools
import warnings

import torch

from syncbn.ops import *  # noqa: F403
from syncbn.ops import Operators, around, in_its_class


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
    """Let ``function(original, *operands)`` run in the place of operators of these names.

    Registered with torch's dispatcher: C++ calls operators, too.
    """
    library = torch.library.Library("syncbn", "IMPL")

    def register(name, function, key):
        kernel = torch.library.get_kernel(f"syncbn::{name}", key)

        def call(keys, *operands):
            return function(functools.partial(kernel.call_boxed, keys), *operands)

        library.impl(name, call, key, with_keyset=True, allow_override=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, function in functions.items():
            for key in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
                register(name, function, key)
    try:
        yield
    finally:
        library._destroy()
