"""Synchronized classes of batch normalization classes: whose instances are still theirs.

A class is derived from one of torch's or a user's, and from :class:`syncbn.SyncBatchNorm`, whose
forward is the next that a ``super().forward`` of the user's class finds. Whether it is called shows
when the layer runs.
"""

import copyreg
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch.fx
from torch import Tensor, nn

# From their own module: a program may have bound the names of torch.nn to something else.
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.utils.parametrize import is_parametrized

from syncbn import _torch_private
from syncbn._torch_private import BatchNormBase
from syncbn.modules import (
    PlainSyncBatchNorm,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    record_call,
)
from syncbn.reverted import BatchNorm

__all__ = ["derive", "is_derived", "synchronized"]

_OF_PLAIN: dict[type[nn.Module], type[SyncBatchNorm]] = {
    BatchNormBase: SyncBatchNorm,
    BatchNorm: SyncBatchNorm,
    BatchNorm1d: SyncBatchNorm1d,
    BatchNorm2d: SyncBatchNorm2d,
    BatchNorm3d: SyncBatchNorm3d,
}
_DIMS = {
    getattr(cls, _torch_private.INPUT_CHECK): ours._syncbn_dims for cls, ours in _OF_PLAIN.items()
}


class _Derived(SyncBatchNorm):
    """What generated classes have in common."""

    def __init_subclass__(cls) -> None:
        """Tell no base class: one that keeps a list of its subclasses expects a program's."""

    def _syncbn_forward(self, *arguments: Any) -> Tensor:
        if not _torch_private.is_exporting():  # which refuses side effects
            self._syncbn.reached = True
        return super()._syncbn_forward(*arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return make, arguments, *state  # the user's class has its own way
        cls: Any = type(self)
        return _new, (cls._syncbn_original, *cls.__bases__[1:]), *state


def _new(*classes: type[nn.Module]) -> nn.Module:
    cls = derive(*classes)
    return cls.__new__(cls)


_made: dict[tuple[type[nn.Module], ...], type[SyncBatchNorm]] = {}


def derive(original: type[nn.Module], *bases: type[nn.Module]) -> type[SyncBatchNorm]:
    """Return the synchronized class of ``original`` that has these bases: always the same."""
    key = (original, *bases)
    if key not in _made:
        input_check = getattr(original, _torch_private.INPUT_CHECK)
        names = {
            "__module__": original.__module__,
            "__doc__": f"{original.__name__} with the statistics of the whole batch.",
            "_syncbn_original": original,
            "_syncbn_dims": _DIMS.get(input_check),
            _torch_private.INPUT_CHECK: input_check,
        }
        name = "Sync" + original.__name__.removeprefix("Sync")
        derived: Any = types.new_class(
            name, (_Derived, *bases), exec_body=lambda body: body.update(names)
        )
        if _has_users_forward(bases[0]):
            derived.forward = _watched(original, derived)
        _made[key] = derived
    return _made[key]


def _watched(original: type[nn.Module], derived: type[SyncBatchNorm]) -> Callable[..., Any]:
    """Return the class's forward, as one node in symbolic tracing; it warns if ours is not run."""

    @functools.wraps(original.forward)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.fx.Proxy) for value in (*args, *kwargs.values())):
            recorded = record_call(layer, forward, *args, **kwargs)
            if recorded is not None:
                return recorded
        if _torch_private.is_exporting():
            return super(derived, layer).forward(*args, **kwargs)
        state = layer._syncbn
        state.reached = False
        output = super(derived, layer).forward(*args, **kwargs)
        if layer.training and not state.reached:
            _warn_of_local_statistics(original.__name__, state.identity.name)
        return output

    return forward


@_torch_private.constant_in_graphs
def _warn_of_local_statistics(cls: str, name: str) -> None:
    warnings.warn(
        f"the layer {name!r} is a {cls} that normalizes by itself in training: its forward did not "
        "call super().forward, so its statistics are this rank's alone. Call that in it, or "
        "convert the model without this layer",
        stacklevel=3,
    )


def synchronized(layer: nn.Module) -> type[SyncBatchNorm] | None:
    """Return the synchronized class of a batch normalization layer's; None where there is none.

    There is none where an attribute ``process_group`` of the program's own would be hidden, nor of
    a parametrized layer, to which torch gives the first base of its class back.
    """
    cls = type(layer)
    has_own_activation = any(hasattr(layer, name) for name in ("activation", "negative_slope"))
    if cls is BatchNorm or (cls in _OF_PLAIN and not has_own_activation):
        return _OF_PLAIN[cls]
    if hasattr(cls, "process_group") or is_parametrized(layer):
        return None
    torchs = next(base for base in cls.__mro__ if base in _OF_PLAIN)
    users = () if cls in _OF_PLAIN else (cls,)
    plain = (PlainSyncBatchNorm,) if _has_users_forward(cls) or has_own_activation else ()
    return derive(cls, *users, *plain, _OF_PLAIN[torchs])


def is_derived(cls: type) -> bool:
    """Whether the class has been made here."""
    return issubclass(cls, _Derived)


def _has_users_forward(cls: type) -> bool:
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    return not owner.__module__.startswith(("torch.nn.modules.", "syncbn."))
