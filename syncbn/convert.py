"""Conversion of a model's batch normalization layers, and the way back."""

import copyreg
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.fx
from torch import Tensor, nn

# From their own module: a program may have bound the names of torch.nn to something else.
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from syncbn import _compat
from syncbn._compat import BatchNormBase
from syncbn.distributed import collectives, groups
from syncbn.distributed.collectives import DeviceMesh, ProcessGroup
from syncbn.modules import (
    BatchNorm,
    LayerState,
    ModuleT,
    PlainSyncBatchNorm,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    SyncBatchNormAct,
    record_call,
)

__all__ = [
    "convert_sync_batchnorm",
    "derive",
    "is_derived",
    "revert_sync_batchnorm",
    "synchronized",
]


_OF_PLAIN: dict[type[nn.Module], type[SyncBatchNorm]] = {
    BatchNormBase: SyncBatchNorm,
    BatchNorm: SyncBatchNorm,
    BatchNorm1d: SyncBatchNorm1d,
    BatchNorm2d: SyncBatchNorm2d,
    BatchNorm3d: SyncBatchNorm3d,
}
_DIMS = {getattr(cls, _compat.INPUT_CHECK): ours._syncbn_dims for cls, ours in _OF_PLAIN.items()}


class _Derived(SyncBatchNorm):
    """What generated classes have in common."""

    def __init_subclass__(cls) -> None:
        """Tell no base class: one that keeps a list of its subclasses expects a program's."""

    def _syncbn_forward(self, *arguments: Any) -> Tensor:
        if not _compat.is_exporting():  # which refuses side effects
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
        input_check = getattr(original, _compat.INPUT_CHECK)
        names = {
            "__module__": original.__module__,
            "__doc__": f"{original.__name__} with the statistics of the whole batch.",
            "_syncbn_original": original,
            "_syncbn_dims": _DIMS.get(input_check),
            _compat.INPUT_CHECK: input_check,
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
        if _compat.is_exporting():
            return super(derived, layer).forward(*args, **kwargs)
        state = layer._syncbn
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


_TORCHS_CLASSES = (BatchNormBase, BatchNorm1d, BatchNorm2d, BatchNorm3d)

# Names that TorchScript keeps of the classes of such layers.
_SCRIPTED = {"BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"}

# Attributes of a layer that takes an activation, with their defaults.
_EPILOGUE = {"activation": None, "negative_slope": 0.01}

Layers = list[tuple[str, nn.Module]]  # with their names in the model


@overload
def convert_sync_batchnorm(
    module: BatchNormBase,
    process_group: ProcessGroup | DeviceMesh | None = None,
    *,
    group_size: int | Literal["node"] | None = None,
) -> BatchNormBase: ...


@overload
def convert_sync_batchnorm(
    module: ModuleT,
    process_group: ProcessGroup | DeviceMesh | None = None,
    *,
    group_size: int | Literal["node"] | None = None,
) -> ModuleT: ...


def convert_sync_batchnorm(
    module: nn.Module,
    process_group: ProcessGroup | DeviceMesh | None = None,
    *,
    group_size: int | Literal["node"] | None = None,
) -> nn.Module:
    """Make a model's batch normalization layers synchronize, as :class:`syncbn.SyncBatchNorm`.

    The layers stay the same objects, with their parameters, buffers, hooks and attributes; only
    their class changes. A BatchNorm2d becomes a :class:`syncbn.SyncBatchNorm2d`, which is both;
    an instance of a subclass gets a class that derives from its own and from ours. A subclass that
    has a ``forward`` synchronizes if that calls ``super().forward``; if it does not, a warning
    names the layer when it first trains. ``torch.nn.SyncBatchNorm`` becomes
    :class:`syncbn.SyncBatchNorm`; timm's ``BatchNormAct2d`` and ``SyncBatchNormAct`` keep their
    activation. A layer that holds another one, and normalizes a part of its input by that, is left
    alone with all that is in it, and so is a scripted module; a warning names it.

    Args:
        module: The model, or a single layer; changed in place.
        process_group: The ranks that share a batch, or a DeviceMesh of one dimension; None is all
            ranks, or for a layer that is synchronized already the group it has.
        group_size: Ranks that share a batch, in place of ``process_group``: groups of so many
            neighboring ranks, or "node" for those of a machine, LOCAL_WORLD_SIZE. All ranks make
            the groups in the first conversion with a size; later ones share them. 1 is local.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is not a module, ``process_group`` not a group or ``group_size`` not a
            number; the class of a layer does not let a class derive from it.
        ValueError: A lazy layer does not know its number of channels yet, or ``fuse_modules_qat``
            has been called and ``prepare_qat`` not yet; ``group_size`` together with
            ``process_group``, no divisor of the number of ranks, not the same on all of them, or
            "node" without LOCAL_WORLD_SIZE.
        RuntimeError: ``group_size`` where torch.distributed is not initialized, or another rank did
            not come to make the groups.

    Nothing has been changed where an error is raised.

    Example:
        >>> from torch import nn
        >>> from syncbn import convert_sync_batchnorm
        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> type(model[1])
        <class 'syncbn.modules.SyncBatchNorm2d'>
    """
    _compat.check_module(module)
    process_group = collectives.checked_group(process_group)
    if group_size is not None:
        if process_group is not None:
            raise ValueError("expected process_group or group_size, but got both")
        process_group = groups.group_of_size(group_size)
    layers, left_alone = _modules_to_visit(module, _cannot_synchronize)
    for name, layer in layers + left_alone:
        if isinstance(layer, LazyModuleMixin) and isinstance(layer, BatchNormBase):
            raise ValueError(
                f"the layer {name!r} is a {type(layer).__name__} that does not know its number of "
                "channels yet; run one batch through the model before converting it"
            )
    _check_not_awaiting_quantization(layers)
    classes = [_sync_class(layer, name) for name, layer in layers]  # before anything is changed
    for (name, layer), cls in zip(layers, classes, strict=True):
        if isinstance(layer, SyncBatchNorm):
            if name:
                layer._syncbn = layer._syncbn.with_name(name)
            if process_group is not None:
                layer.process_group = process_group
        elif cls is not None:
            _synchronize(layer, cls, name, process_group)
    _bind_forward_again(layers)
    for name, layer in left_alone:
        synchronizes = "stays torch's" if _is_synchronized(layer) else "does not synchronize"
        warnings.warn(_left_alone_message(layer, name, synchronizes), stacklevel=2)
    for patched in _patched_classes(classes):
        warnings.warn(
            f"torch.nn.{patched.__name__}.forward is not torch's own, but {patched.forward!r}; "
            "converted layers do not run it",
            stacklevel=2,
        )
    return module


def _synchronize(
    layer: nn.Module, cls: type[SyncBatchNorm], name: str, group: ProcessGroup | None
) -> None:
    """Make a layer one of class ``cls``."""
    state = LayerState(name)
    if isinstance(layer, TorchSyncBatchNorm):
        held = layer.__dict__.pop("process_group")
    else:
        held = vars(layer).get("process_group")
        if cls is SyncBatchNorm:
            state = state.replaced(original=type(layer))
    layer.__class__ = cls  # type: ignore[assignment]
    layer._syncbn = state.with_group(held if group is None else group)  # type: ignore[assignment]
    if cls._syncbn_takes_activation:
        for attribute, value in _EPILOGUE.items():
            layer.__dict__.setdefault(attribute, value)


def _bind_forward_again(layers: Layers) -> None:
    """Renew the attributes of modules that hold a layer's ``forward``, bound with its old code."""
    for _, module in layers:
        for attribute, value in vars(module).items():
            if isinstance(value, types.MethodType) and value.__name__ == "forward":
                layer = value.__self__
                if isinstance(layer, BatchNormBase) and attribute != "forward":
                    module.__dict__[attribute] = layer.forward


def _patched_classes(classes: list[type[SyncBatchNorm] | None]) -> list[type[nn.Module]]:
    """Return torch's classes, of those that the layers have, whose forward is not torch's code."""
    of_layers = {base for cls in classes if cls is not None for base in cls.__mro__}
    torchs = [cls for cls in _TORCHS_CLASSES if cls in of_layers and "forward" in vars(cls)]
    return [cls for cls in torchs if not _compat.is_code_of_batch_norm(cls.forward)]


@overload
def revert_sync_batchnorm(module: BatchNormBase) -> BatchNormBase: ...


@overload
def revert_sync_batchnorm(module: ModuleT) -> ModuleT: ...


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Make a model's synchronized batch normalization layers ordinary ones.

    The inverse of :func:`convert_sync_batchnorm` and :func:`fuse_activations`, for export,
    inference and debugging on one device. The layers stay the same objects. A converted layer gets
    its class back; one that was built as a SyncBatchNorm, ours or torch's, or has an activation of
    its own becomes a batch normalization of any number of dimensions, with that activation. Fused
    activations are modules and calls again.

    Args:
        module: The model, or a single layer; changed in place.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: A module whose code is fused has been compiled by itself. Nothing has been
            changed then.

    Example:
        >>> from torch import nn
        >>> from syncbn import convert_sync_batchnorm, revert_sync_batchnorm
        >>> type(revert_sync_batchnorm(convert_sync_batchnorm(nn.BatchNorm2d(8)))).__name__
        'BatchNorm2d'
    """
    _compat.check_module(module)
    layers, left_alone = _modules_to_visit(
        module, lambda layer, _: _is_synchronized(layer) and not _is_plain(layer)
    )
    for name, layer in layers:
        block = _compat.compiled_original(layer) or layer
        if _undo_of(block) is not None and (block is not layer or _compat.is_compiled(block)):
            raise ValueError(
                f"the module {name!r} has been fused and then compiled by itself, so that its old "
                "code would go on to run; revert the model first and compile after that"
            )
    _undo_fusion(module)
    for _, layer in layers:
        if isinstance(layer, SyncBatchNorm):
            _desynchronize(layer)
        elif isinstance(layer, TorchSyncBatchNorm):
            layer.__dict__.pop("process_group", None)
            layer.__dict__.update(_EPILOGUE)
            layer.__class__ = BatchNorm  # type: ignore[assignment]
    _bind_forward_again(layers)
    for name, layer in left_alone:
        warnings.warn(_left_alone_message(layer, name, "still synchronizes"), stacklevel=2)
    return module


def _desynchronize(layer: SyncBatchNorm) -> None:
    """Give a layer the class that it had before conversion, or that of a reverted layer."""
    cls = layer._syncbn.original or layer._syncbn_original or BatchNorm
    if layer._syncbn_takes_activation:
        if layer.activation is not None:
            cls = BatchNorm
        elif cls is not BatchNorm:
            for attribute in _EPILOGUE:
                layer.__dict__.pop(attribute, None)
    del layer._syncbn
    layer.__class__ = cls  # type: ignore[assignment]


def _undo_of(module: nn.Module | None) -> Callable[[Any], nn.Module] | None:
    """Return the method of a module that fusion has made which gives back the module before."""
    return getattr(type(module), "_syncbn_undo", None)


def _undo_fusion(model: nn.Module) -> None:
    for module in list(model.modules()):
        undo = _undo_of(module)
        if undo is not None:
            undo(module)
        children = _compat.children(module)
        for name, child in children.items():
            undo = _undo_of(child)
            if undo is not None:
                children[name] = undo(child)


def _modules_to_visit(
    root: nn.Module, is_left_alone: Callable[[nn.Module, str], bool]
) -> tuple[Layers, Layers]:
    """Return the modules of a model, each once, and those of them that are left alone.

    Children of a layer that is left alone are skipped, because its methods may depend on them.
    """
    layers: Layers = []
    left_alone: Layers = []
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if is_left_alone(module, name):
            left_alone.append((name, module))
            return
        layers.append((name, module))
        for child_name, child in _compat.children(module).items():
            if child is not None:
                visit(child, f"{name}.{child_name}" if name else child_name)

    visit(root, "")
    return layers, left_alone


def _check_not_awaiting_quantization(layers: Layers) -> None:
    """Raise ValueError where ``prepare_qat`` would put a batch normalization of torch's again."""
    for name, module in layers:
        is_fused = type(module).__module__ == "torch.ao.nn.intrinsic.modules.fused"
        if is_fused and any(isinstance(child, BatchNormBase) for child in module.children()):
            raise ValueError(
                f"the module {name!r} is a {type(module).__name__} of fuse_modules_qat, which "
                "prepare_qat replaces with an ordinary batch normalization in it; call prepare_qat "
                "first and convert the model after that"
            )


def _is_synchronized(layer: nn.Module) -> bool:
    return isinstance(layer, (SyncBatchNorm, TorchSyncBatchNorm))


def _left_alone_message(layer: nn.Module, name: str, consequence: str) -> str:
    if isinstance(layer, torch.jit.ScriptModule):
        return (
            f"the module {name!r} is scripted with batch normalization in it, is left as it is and "
            f"{consequence}; convert the module that it was scripted from"
        )
    return (
        f"the layer {name!r} is a {type(layer).__name__}, which is not plain batch normalization: "
        f"it has methods of its own, is left as it is and {consequence}"
    )


# Names that a subclass may define and still be the layer it derives from.
_HARMLESS = {"__init__", _compat.INPUT_CHECK, "extra_repr"}
# Made by Python 3.14 for annotations.
_HARMLESS |= {"__annotate__", "__annotate_func__"}


def _is_plain(layer: nn.Module) -> bool:
    """Whether the layer does what one of torch's or our own classes does, and nothing else."""
    if "forward" in vars(layer):  # replaced on the instance
        return False
    if is_derived(type(layer)):
        return True
    for cls in type(layer).__mro__:
        if cls.__module__ in ("builtins", "typing"):
            continue
        if cls.__module__.startswith(("torch.nn.modules.", "syncbn.")):
            continue
        # Methods, and whatever is called in the place of one of the base class.
        own = {
            name
            for name, value in vars(cls).items()
            if inspect.isroutine(value)
            or isinstance(value, property)
            or (callable(value) and hasattr(BatchNormBase, name))
        }
        if own - _HARMLESS:
            return False
    return True


def _sync_class(layer: nn.Module, name: str) -> type[SyncBatchNorm] | None:
    """Return the class that does what this layer does, synchronized; None if there is none.

    Raises:
        TypeError: Python cannot derive a class from the layer's.
    """
    if not isinstance(layer, BatchNormBase) or isinstance(layer, SyncBatchNorm):
        return None
    if "forward" in vars(layer):  # replaced on the instance
        return None
    if isinstance(layer, TorchSyncBatchNorm) and _timms_class(layer) is None:
        return SyncBatchNorm if _is_plain(layer) else None
    inside = (module for module in layer.modules() if module is not layer)
    if any(isinstance(module, BatchNormBase) for module in inside):
        return None  # which normalizes a part by itself
    if not collectives.is_group(vars(layer).get("process_group")):
        return None  # an attribute of the program's own, which our property would hide
    try:
        timms = _timms_class(layer)
        if timms is not None:
            return derive(timms, SyncBatchNormAct, timms)
        return synchronized(layer)
    except Exception as error:  # of the code that a metaclass runs
        raise TypeError(
            f"the layer {name!r} is a {type(layer).__name__}, and no class can derive from that: "
            f"{type(error).__name__}: {error}"
        ) from error


def _cannot_synchronize(layer: nn.Module, name: str) -> bool:
    """Whether the layer normalizes batches in a way that none of our classes does."""
    if isinstance(layer, torch.jit.ScriptModule):
        scripted = (getattr(module, "original_name", "") for module in layer.modules())
        return any(name in _SCRIPTED for name in scripted)
    is_other = isinstance(layer, BatchNormBase) and not isinstance(layer, SyncBatchNorm)
    return is_other and _sync_class(layer, name) is None


def _timms_class(layer: nn.Module) -> type[nn.Module] | None:
    """Return timm's ``BatchNormAct2d`` if the layer is one or was one before timm's converter."""
    cls, children = type(layer), _compat.children(layer)
    if cls.__module__.startswith("timm.") and {"drop", "act"} <= children.keys():
        if cls.__name__ == "BatchNormAct2d":
            return cls
        if cls.__name__ == "SyncBatchNormAct":
            return getattr(sys.modules[cls.__module__], "BatchNormAct2d", None)
    return None
