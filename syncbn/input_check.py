"""The check of a layer's input, where a program has put its own in the place of torch's."""

import functools
import warnings
from typing import Any

from torch import Tensor

from syncbn._compat import INPUT_CHECK


class InputCheck(property):
    """A layer's method that torch's ``forward`` calls, where a program bound it before conversion.

    As a property it comes before an attribute of the instance.
    """

    def __init__(self) -> None:
        super().__init__(lambda layer: functools.partial(_called_check, layer), self.set, self.drop)

    def __call__(self, layer: Any, input: Tensor) -> None:
        """Do as the method of a class, called with a layer."""
        _called_check(layer, input)

    @staticmethod
    def set(layer: Any, check: Any) -> None:
        """Set the attribute of the instance; this method, which a program gives back, is none."""
        vars(layer).pop(INPUT_CHECK, None)
        if getattr(check, "func", None) is not _called_check:
            vars(layer)[INPUT_CHECK] = check

    @staticmethod
    def drop(layer: Any) -> None:
        """Delete the attribute of the instance."""
        if vars(layer).pop(INPUT_CHECK, None) is None:
            raise AttributeError(INPUT_CHECK)


def _called_check(layer: Any, input: Tensor) -> None:
    """Check where torch's ``forward`` runs, or where a program's own check calls this one."""
    state = layer._syncbn
    if state.inner_check is not None:
        state.inner_check(layer, input)
        return
    if layer.training and state.reached is None:
        warnings.warn(
            f"torch's forward of {state.identity} was called, by its name or by a method that "
            "was bound before conversion, and normalizes this rank's values by themselves; "
            "call the layer",
            stacklevel=3,
        )
    own_check(layer, input)


def own_check(layer: Any, input: Tensor) -> None:
    """Make the check that torch's layer would make: of the instance or of its class."""
    own = vars(layer).get(INPUT_CHECK)
    if own is None:
        _class_check(layer, input)
    else:
        _run_check(layer, own, input, inner=_class_check)


def _class_check(layer: Any, input: Tensor) -> None:
    check: Any = type(layer)._check_input_dim
    if check is CALLED_BY_TORCH:
        check = layer._syncbn_original._check_input_dim
    _run_check(
        layer, functools.partial(check, layer), input, inner=type(layer)._syncbn_torchs_check
    )


def _run_check(layer: Any, check: Any, input: Tensor, inner: Any) -> None:
    state = layer._syncbn
    before, state.inner_check = state.inner_check, inner
    try:
        check(input)
    finally:
        state.inner_check = before


# One for all classes: conversion puts it before the check of a user's class, too.
CALLED_BY_TORCH: Any = InputCheck()
