"""The synchronized class of each batch normalization layer, made where there is none."""

import functools
import inspect
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
from syncbn.batch_norm import BatchNorm
from syncbn.conversion.classes import reduce_as, set_class
from syncbn.conversion.timm import SyncBatchNormAct, is_timms, timms_class
from syncbn.distributed import collectives
from syncbn.entry import entry
from syncbn.input_check import CALLED_BY_TORCH
from syncbn.layer_state import LayerState
from syncbn.modules import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from syncbn.pickles import RECONSTRUCTIONS, _reconstruct

# Attributes of a layer that takes an activation, with their defaults.
EPILOGUE: dict[str, Any] = {"activation": None, "negative_slope": 0.01}

# The synchronized class of each of torch's.
SYNCHRONIZED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    BatchNormBase: SyncBatchNorm,
    BatchNorm1d: SyncBatchNorm1d,
    BatchNorm2d: SyncBatchNorm2d,
    BatchNorm3d: SyncBatchNorm3d,
}


class _Derived(SyncBatchNorm):
    """The first base of the classes that conversion derives from other classes."""

    _check_input_dim = CALLED_BY_TORCH  # before that of the user's class

    def __init_subclass__(cls) -> None:
        """Call no base class, which may keep a list of the subclasses that a program defines."""

    def _syncbn_forward(self, *arguments: Any) -> Tensor:
        if self._syncbn.reached is False:
            self._syncbn.reached = True
        return super()._syncbn_forward(*arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as the user's class does. Loading the pickle converts the layer again."""
        if "_syncbn_original" not in vars(type(self)):  # of a class that others have derived
            return super().__reduce_ex__(protocol)
        reduced = reduce_as(self, self._syncbn_original, protocol)
        if isinstance(reduced, str):  # the name of an object that exists
            return reduced
        make, arguments, *state = reduced
        return _reconstruct, ("converted", *_conversion_of(self), make, arguments), *state


class _TorchsMethods:
    """What a user's class reaches by super() as before conversion: torch's methods, not ours."""

    __init__ = BatchNormBase.__init__  # its arguments are others
    _check_input_dim = SyncBatchNorm._syncbn_torchs_check


@functools.cache
def _derive(original: type[nn.Module], takes_activation: bool) -> type[SyncBatchNorm]:
    """Return the class that does as ``original``, with the statistics of the whole batch."""
    if is_timms(original):
        bases: tuple[type, ...] = (SyncBatchNormAct, original)
    else:
        torchs = next(base for base in original.__mro__ if base in SYNCHRONIZED)
        bases = (_TorchsMethods, SYNCHRONIZED[torchs])
        if original is not torchs:
            bases = (original, *bases)
    names = {
        "__module__": original.__module__,
        "__doc__": f"{original.__name__} with the statistics of the whole batch.",
        "_syncbn_original": original,
        "_syncbn_takes_activation": takes_activation,
        "__init__": _constructor(original, takes_activation),
    }
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(original, name):
            names[name] = _converted_copy(getattr(original, name))
    name = "Sync" + original.__name__.removeprefix("Sync")
    derived: Any = types.new_class(
        name, (_Derived, *bases), exec_body=lambda body: body.update(names)
    )
    if not takes_activation:
        derived.forward = _checked_forward(original, derived)
    return derived  # type: ignore[no-any-return]


def _conversion_of(layer: SyncBatchNorm) -> tuple[type[BatchNormBase], bool, dict[str, Any]]:
    """Return a layer's class before conversion, and what conversion has added to the layer."""
    takes_activation = layer._syncbn_takes_activation
    names = ("_syncbn", *EPILOGUE) if takes_activation else ("_syncbn",)
    held = {name: value for name, value in vars(layer).items() if name in names}
    return layer._syncbn_original, takes_activation, held


def _new_derived(original: Any, takes_activation: bool) -> nn.Module:
    cls = _derive(original, takes_activation)
    return cls.__new__(cls)


def _convert_made(
    original: Any,
    takes_activation: bool,
    held: dict[str, Any],
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Convert a copy of a converted layer that ``make``, code of the user's class, returns."""
    layer = make(*arguments)
    if isinstance(layer, original):
        layer.__dict__.update(held)
        set_class(layer, _derive(original, takes_activation))
    return layer


RECONSTRUCTIONS["derived"] = _new_derived  # of pickles before "converted"
RECONSTRUCTIONS["converted"] = _convert_made


def _constructor(original: type[nn.Module], takes_activation: bool) -> Callable[..., None]:
    """Return the class's constructor, which calls none of ours, as one of a converted layer."""

    @functools.wraps(original.__init__)
    def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:
        layer.__dict__.update(EPILOGUE if takes_activation else {}, _syncbn=LayerState())
        original.__init__(layer, *args, **kwargs)

    return __init__


def _converted_copy(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the class's own way to copy a layer, as one of a converted layer."""

    @functools.wraps(method)
    def copy(layer: Any, *memo: Any) -> Any:
        return _convert_made(*_conversion_of(layer), method, (layer, *memo))

    return copy


def _has_reached_ours(layer: Any, _: Exception) -> bool:
    """Whether the forward of a user's class, which has raised, had called ours."""
    state = layer._syncbn
    reached, state.reached = state.reached, None
    return bool(reached)


def _checked_forward(
    original: type[nn.Module], derived: type[SyncBatchNorm]
) -> Callable[..., Tensor]:
    """Return the class's forward, which warns in training if it does not reach ours."""

    @functools.partial(entry, has_begun=_has_reached_ours)
    @functools.wraps(original.forward)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        state = layer._syncbn
        if _compat.is_exporting():  # which refuses side effects
            return super(derived, layer).forward(*args, **kwargs)
        state.reached = False
        output = super(derived, layer).forward(*args, **kwargs)
        if layer.training and not state.reached:
            _warn_of_local_statistics(original.__name__, state.identity.name)
        state.reached = None
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
    try:
        return _sync_class(layer)
    except Exception as error:
        raise cannot_take_its_place(layer, name, error) from error


def cannot_take_its_place(layer: nn.Module, name: str, error: Exception) -> TypeError:
    """Return the error of a layer that conversion cannot change, because of its class's code."""
    return TypeError(
        f"the layer {name!r} is a {type(layer).__name__}, and no class can derive from that and "
        f"take its place: {type(error).__name__}: {error}"
    )


def _sync_class(layer: nn.Module) -> type[SyncBatchNorm] | None:
    if not isinstance(layer, BatchNormBase) or isinstance(layer, SyncBatchNorm):
        return None
    if "forward" in vars(layer):  # replaced on the instance
        return None
    cls: Any = type(layer)
    timms: Any = timms_class(layer)
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
    return _derive(timms or cls, takes_activation)
