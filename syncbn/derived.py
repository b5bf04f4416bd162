"""The synchronized class of each batch normalization layer, made where there is none."""

import copyreg
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# From their own module: a program may have bound the names of torch.nn to something else.
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.utils.parametrize import is_parametrized

from syncbn import _compat
from syncbn._compat import BatchNormBase
from syncbn.distributed import collectives
from syncbn.modules import (
    BatchNorm,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    SyncBatchNormAct,
    fx_leaf,
)
from syncbn.pickles import RECONSTRUCTIONS, _reconstruct

# The synchronized class of each of torch's.
SYNCHRONIZED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    BatchNormBase: SyncBatchNorm,
    BatchNorm1d: SyncBatchNorm1d,
    BatchNorm2d: SyncBatchNorm2d,
    BatchNorm3d: SyncBatchNorm3d,
}
_DIMS = {getattr(cls, _compat.INPUT_CHECK): ours._syncbn_dims for cls, ours in SYNCHRONIZED.items()}

# Attributes of a layer that takes an activation, with their defaults.
EPILOGUE = {"activation": None, "negative_slope": 0.01}


class _Derived(SyncBatchNorm):
    """The first base of the classes that conversion derives from other classes."""

    def __init_subclass__(cls) -> None:
        """Call no base class, which may keep a list of the subclasses that a program defines."""

    def _syncbn_forward(self, *arguments: Any) -> Tensor:
        if not _compat.is_exporting():  # which refuses side effects
            self._syncbn.reached = True
        return super()._syncbn_forward(*arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return make, arguments, *state  # the user's class has its own way
        kept = ("derived", self._syncbn_original, self._syncbn_takes_activation)
        return _reconstruct, kept, *state


@functools.cache
def _derive(original: type[nn.Module], takes_activation: bool) -> type[SyncBatchNorm]:
    """Return the class that does as ``original``, with the statistics of the whole batch."""
    if _is_timms(original):
        bases: tuple[type[nn.Module], ...] = (SyncBatchNormAct, original)
    else:
        torchs = next(base for base in original.__mro__ if base in SYNCHRONIZED)
        bases = (SYNCHRONIZED[torchs],)
        if original is not torchs:
            bases = (original, *bases)
    input_check = getattr(original, _compat.INPUT_CHECK)
    names = {
        "__module__": original.__module__,
        "__doc__": f"{original.__name__} with the statistics of the whole batch.",
        "_syncbn_original": original,
        "_syncbn_dims": _DIMS.get(input_check),
        "_syncbn_takes_activation": takes_activation,
        _compat.INPUT_CHECK: input_check,
    }
    name = "Sync" + original.__name__.removeprefix("Sync")
    derived: Any = types.new_class(
        name, (_Derived, *bases), exec_body=lambda body: body.update(names)
    )
    if not takes_activation:
        derived.forward = _checked_forward(original, derived)
    return derived  # type: ignore[no-any-return]


def _new_derived(original: Any, takes_activation: bool) -> nn.Module:
    cls = _derive(original, takes_activation)
    return cls.__new__(cls)


RECONSTRUCTIONS["derived"] = _new_derived


def _checked_forward(
    original: type[nn.Module], derived: type[SyncBatchNorm]
) -> Callable[..., Tensor]:
    """Return the class's forward, which warns in training if it does not reach ours."""

    @fx_leaf
    @functools.wraps(original.forward)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        state = layer._syncbn
        if _compat.is_exporting():
            return super(derived, layer).forward(*args, **kwargs)
        state.reached = False
        output = super(derived, layer).forward(*args, **kwargs)
        if layer.training and not state.reached:
            _warn_of_local_statistics(original.__name__, state.identity.name)
        return output

    return forward


@_compat.constant_in_graphs
def _warn_of_local_statistics(cls: str, name: str) -> None:
    warnings.warn(
        f"the layer {name!r} is a {cls} that normalizes by itself in training: its forward did not "
        "call super().forward, so its statistics are this rank's alone. Call that in it, or "
        "convert the model without this layer",
        stacklevel=4,
    )


def _is_librarys(cls: type) -> bool:
    """Whether torch or syncbn defines the class."""
    return f"{cls.__module__}.".startswith(("torch.nn.modules.", "syncbn."))


# Methods that a subclass may override and still compute what its base computes.
_HARMLESS = {"__init__", _compat.INPUT_CHECK, "extra_repr"}
# Made by Python 3.14 for annotations.
_HARMLESS |= {"__annotate__", "__annotate_func__"}


def has_own_methods(layer: nn.Module) -> bool:
    """Whether the layer may compute something else than torch's and our classes."""
    if "forward" in vars(layer):  # replaced on the instance
        return True
    if isinstance(layer, _Derived):
        return False
    for cls in type(layer).__mro__:
        if cls.__module__ in ("builtins", "typing") or _is_librarys(cls):
            continue
        for name, value in vars(cls).items():
            is_method = inspect.isroutine(value) or isinstance(value, property)
            replaces_one = callable(value) and hasattr(BatchNormBase, name)
            if (is_method or replaces_one) and name not in _HARMLESS:
                return True
    return False


def sync_class(layer: nn.Module, name: str) -> type[SyncBatchNorm] | None:
    """Return the class that does what this layer does, synchronized; None if there is none.

    Raises:
        TypeError: Python cannot derive a class from the layer's.
    """
    if not isinstance(layer, BatchNormBase) or isinstance(layer, SyncBatchNorm):
        return None
    if "forward" in vars(layer):  # replaced on the instance
        return None
    cls: Any = type(layer)
    timms: Any = _timms_class(layer)
    if isinstance(layer, TorchSyncBatchNorm) and timms is None:
        return None if has_own_methods(layer) else SyncBatchNorm
    inside = (module for module in layer.modules() if module is not layer)
    if any(isinstance(module, BatchNormBase) for module in inside):
        return None  # it normalizes a part of its input by another layer
    if not collectives.is_group(vars(layer).get("process_group")):
        return None  # an attribute of the program, which our property would hide
    has_own_activation = any(hasattr(layer, attribute) for attribute in EPILOGUE)
    if cls is BatchNorm:
        return SyncBatchNorm
    if cls in SYNCHRONIZED and not has_own_activation:
        return SYNCHRONIZED[cls]
    if timms is None and (hasattr(cls, "process_group") or is_parametrized(layer)):
        return None  # likewise; torch gives a parametrized layer the first base of its class back
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    takes_activation = timms is not None or (_is_librarys(owner) and not has_own_activation)
    try:
        return _derive(timms or cls, takes_activation)
    except Exception as error:  # of the code that a metaclass runs
        raise TypeError(
            f"the layer {name!r} is a {cls.__name__}, and no class can derive from that: "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_timms(cls: type[nn.Module]) -> bool:
    return cls.__module__.startswith("timm.") and cls.__name__ == "BatchNormAct2d"


def _timms_class(layer: nn.Module) -> type[nn.Module] | None:
    """Return timm's ``BatchNormAct2d`` if the layer is one or was one before timm's converter."""
    cls: type[nn.Module] = type(layer)
    if cls.__module__.startswith("timm.") and cls.__name__ == "SyncBatchNormAct":
        cls = getattr(sys.modules[cls.__module__], "BatchNormAct2d", cls)
    is_whole = {"drop", "act"} <= _compat.children(layer).keys()
    return cls if is_whole and _is_timms(cls) else None
