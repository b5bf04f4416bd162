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
    RECONSTRUCTIONS,
    BatchNorm,
    LayerState,
    ModuleT,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    SyncBatchNormAct,
    _reconstruct,
    fx_leaf,
)

Layers = list[tuple[str, nn.Module]]  # with their names in the model

# The synchronized class of each of torch's.
_SYNCHRONIZED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    BatchNormBase: SyncBatchNorm,
    BatchNorm1d: SyncBatchNorm1d,
    BatchNorm2d: SyncBatchNorm2d,
    BatchNorm3d: SyncBatchNorm3d,
}
_DIMS = {
    getattr(cls, _compat.INPUT_CHECK): ours._syncbn_dims for cls, ours in _SYNCHRONIZED.items()
}

# The class names that TorchScript keeps of batch normalization layers.
_SCRIPTED = {"BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"}

# Attributes of a layer that takes an activation, with their defaults.
_EPILOGUE = {"activation": None, "negative_slope": 0.01}


class _Derived(SyncBatchNorm):
    """The first base of the classes that conversion derives from other classes."""

    def __init_subclass__(cls) -> None:
        """Call no base class, which may keep a list of the subclasses that a program defines."""

    def _syncbn_forward(self, *arguments: Any) -> Tensor:
        if not _compat.is_exporting():  # which refuses side effects
            self._syncbn.reached = True
        return super()._syncbn_forward(*arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, arguments, *state = super().__reduce_ex__(protocol)  # type: ignore[misc]
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
        torchs = next(base for base in original.__mro__ if base in _SYNCHRONIZED)
        bases = (_SYNCHRONIZED[torchs],)
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
    activation. Conversion skips a layer that holds another one, and normalizes a part of its input
    by that, with all its children; it skips scripted modules too. A warning names each.

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
        <class 'syncbn.SyncBatchNorm2d'>
    """
    _compat.check_module(module)
    process_group = collectives.checked_group(process_group)
    if group_size is not None:
        if process_group is not None:
            raise ValueError("expected process_group or group_size, but got both")
        process_group = groups.group_of_size(group_size)
    layers, skipped = _modules_to_visit(module, _cannot_synchronize)
    for name, layer in layers + skipped:
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
    for name, layer in skipped:
        consequence = "stays torch's" if _is_synchronized(layer) else "does not synchronize"
        warnings.warn(_skip_message(layer, name, consequence), stacklevel=2)
    converted = {base for cls in classes if cls is not None for base in cls.__mro__}
    for torchs in _SYNCHRONIZED:
        if torchs in converted and not _compat.is_code_of_batch_norm(torchs.forward):
            warnings.warn(
                f"torch.nn.{torchs.__name__}.forward is not torch's own, but {torchs.forward!r}; "
                "converted layers do not run it",
                stacklevel=2,
            )
    return module


def _synchronize(
    layer: nn.Module, cls: type[SyncBatchNorm], name: str, group: ProcessGroup | None
) -> None:
    """Make a layer one of class ``cls``."""
    held = vars(layer).get("process_group")
    if isinstance(layer, TorchSyncBatchNorm):
        del layer.__dict__["process_group"]
    layer.__class__ = cls  # type: ignore[assignment]
    state = LayerState(name).with_group(held if group is None else group)
    layer._syncbn = state  # type: ignore[assignment]
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
    layers, skipped = _modules_to_visit(
        module, lambda layer, _: _is_synchronized(layer) and _has_own_methods(layer)
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
    for name, layer in skipped:
        warnings.warn(_skip_message(layer, name, "still synchronizes"), stacklevel=2)
    return module


def _desynchronize(layer: SyncBatchNorm) -> None:
    """Give a layer the class that it had before conversion, or that of a reverted layer."""
    cls = layer._syncbn_original
    if layer._syncbn_takes_activation:
        if layer.activation is not None:
            cls = BatchNorm
        elif cls is not BatchNorm:
            for attribute in _EPILOGUE:
                layer.__dict__.pop(attribute, None)
    del layer._syncbn
    layer.__class__ = cls  # type: ignore[assignment]


def _undo_of(module: nn.Module | None) -> Callable[[Any], nn.Module] | None:
    """Return the method by which a module that fusion has made gives back the original one."""
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
    root: nn.Module, is_skipped: Callable[[nn.Module, str], bool]
) -> tuple[Layers, Layers]:
    """Return the modules of a model, each once, and the skipped ones.

    Children of a skipped layer are in neither list, because its methods may depend on them.
    """
    layers: Layers = []
    skipped: Layers = []
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if is_skipped(module, name):
            skipped.append((name, module))
            return
        layers.append((name, module))
        for child_name, child in _compat.children(module).items():
            if child is not None:
                visit(child, f"{name}.{child_name}" if name else child_name)

    visit(root, "")
    return layers, skipped


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


def _skip_message(layer: nn.Module, name: str, consequence: str) -> str:
    if isinstance(layer, torch.jit.ScriptModule):
        return (
            f"the module {name!r} is scripted with batch normalization in it, is left as it is and "
            f"{consequence}; convert the module that it was scripted from"
        )
    return (
        f"the layer {name!r} is a {type(layer).__name__}, which is not plain batch normalization: "
        f"it has methods of its own, is left as it is and {consequence}"
    )


# Methods that a subclass may override and still compute what its base computes.
_HARMLESS = {"__init__", _compat.INPUT_CHECK, "extra_repr"}
# Made by Python 3.14 for annotations.
_HARMLESS |= {"__annotate__", "__annotate_func__"}


def _has_own_methods(layer: nn.Module) -> bool:
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


def _sync_class(layer: nn.Module, name: str) -> type[SyncBatchNorm] | None:
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
        return None if _has_own_methods(layer) else SyncBatchNorm
    inside = (module for module in layer.modules() if module is not layer)
    if any(isinstance(module, BatchNormBase) for module in inside):
        return None  # it normalizes a part of its input by another layer
    if not collectives.is_group(vars(layer).get("process_group")):
        return None  # an attribute of the program, which our property would hide
    has_own_activation = any(hasattr(layer, attribute) for attribute in _EPILOGUE)
    if cls is BatchNorm:
        return SyncBatchNorm
    if cls in _SYNCHRONIZED and not has_own_activation:
        return _SYNCHRONIZED[cls]
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


def _cannot_synchronize(layer: nn.Module, name: str) -> bool:
    """Whether the layer normalizes batches in a way that none of our classes does."""
    if isinstance(layer, torch.jit.ScriptModule):
        scripted = (getattr(module, "original_name", "") for module in layer.modules())
        return any(name in _SCRIPTED for name in scripted)
    is_other = isinstance(layer, BatchNormBase) and not isinstance(layer, SyncBatchNorm)
    return is_other and _sync_class(layer, name) is None


def _is_timms(cls: type[nn.Module]) -> bool:
    return cls.__module__.startswith("timm.") and cls.__name__ == "BatchNormAct2d"


def _timms_class(layer: nn.Module) -> type[nn.Module] | None:
    """Return timm's ``BatchNormAct2d`` if the layer is one or was one before timm's converter."""
    cls: type[nn.Module] = type(layer)
    if cls.__module__.startswith("timm.") and cls.__name__ == "SyncBatchNormAct":
        cls = getattr(sys.modules[cls.__module__], "BatchNormAct2d", cls)
    is_whole = {"drop", "act"} <= _compat.children(layer).keys()
    return cls if is_whole and _is_timms(cls) else None
