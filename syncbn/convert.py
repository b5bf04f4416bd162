"""Conversion of a model's batch normalization layers, and the way back."""

import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import nn

# From their own module: a program may have bound the names of torch.nn to something else.
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from syncbn import _torch_private, collectives, fused, groups, subclasses
from syncbn._torch_private import BatchNormBase
from syncbn.collectives import DeviceMesh, ProcessGroup
from syncbn.modules import LayerState, ModuleT, SyncBatchNorm, SyncBatchNormAct
from syncbn.reverted import BatchNorm

__all__ = ["check_module", "convert_sync_batchnorm", "revert_sync_batchnorm"]

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
    check_module(module)
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
    return [cls for cls in torchs if not _torch_private.is_code_of_batch_norm(cls.forward)]


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
    check_module(module)
    layers, left_alone = _modules_to_visit(
        module, lambda layer, _: _is_synchronized(layer) and not _is_plain(layer)
    )
    for name, layer in layers:
        block = _torch_private.compiled_original(layer) or layer
        if isinstance(block, fused.FusedBlock) and (
            block is not layer or _torch_private.is_compiled(block)
        ):
            raise ValueError(
                f"the module {name!r} has been fused and then compiled by itself, so that its old "
                "code would go on to run; revert the model first and compile after that"
            )
    fused.unfuse(module)
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


def check_module(module: object) -> None:
    """Raise TypeError unless it is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}")


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
        for child_name, child in _torch_private.children(module).items():
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
_HARMLESS = {"__init__", _torch_private.INPUT_CHECK, "extra_repr"}
# Made by Python 3.14 for annotations.
_HARMLESS |= {"__annotate__", "__annotate_func__"}


def _is_plain(layer: nn.Module) -> bool:
    """Whether the layer does what one of torch's or our own classes does, and nothing else."""
    if "forward" in vars(layer):  # replaced on the instance
        return False
    if subclasses.is_derived(type(layer)):
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
            return subclasses.derive(timms, SyncBatchNormAct, timms)
        return subclasses.synchronized(layer)
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
    cls, children = type(layer), _torch_private.children(layer)
    if cls.__module__.startswith("timm.") and {"drop", "act"} <= children.keys():
        if cls.__name__ == "BatchNormAct2d":
            return cls
        if cls.__name__ == "SyncBatchNormAct":
            return getattr(sys.modules[cls.__module__], "BatchNormAct2d", None)
    return None
