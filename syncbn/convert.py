"""Conversion of a model's batch normalization layers, and the way back."""

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal, overload

from torch import nn

# From its own module: a program may have bound torch.nn.SyncBatchNorm to our layer.
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from syncbn import _torch_private, collectives, fused, groups, subclasses
from syncbn._torch_private import BatchNormBase
from syncbn.collectives import DeviceMesh, ProcessGroup
from syncbn.modules import ModuleT, SyncBatchNorm, SyncBatchNormAct
from syncbn.reverted import BatchNorm

__all__ = ["check_module", "convert_sync_batchnorm", "revert_sync_batchnorm"]

# That a layer has while it synchronizes: ours, and torch's first.
_ATTRIBUTES = (
    "process_group",
    "_process_group",
    "_fits_graph",
    "_identity",
    "_identity_tensor",
    "_converted_from",
    "_frozen",
)
_FOLLOWING = {"activation": None, "negative_slope": 0.01}

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
    """Replace a model's batch normalization layers by :class:`syncbn.SyncBatchNorm`.

    A layer keeps its class: a BatchNorm2d becomes a :class:`syncbn.SyncBatchNorm2d`, which is both;
    an instance of a subclass one of a class that derives from it and from ours. A subclass may have
    a ``forward`` that leaves normalization to ``super().forward``. ``torch.nn.SyncBatchNorm``
    becomes :class:`syncbn.SyncBatchNorm`; timm's ``BatchNormAct2d`` and ``SyncBatchNormAct`` keep
    their activation. Parameters and buffers stay the same objects, so do hooks, training mode,
    ``qconfig`` and whatever else the layer carries; a layer registered twice stays one. A subclass
    that may normalize by itself is left alone with all that is in it, and a warning names it.

    Args:
        module: The model; changed in place. An ordinary batch normalization layer itself is not.
        process_group: The ranks that share a batch, or a DeviceMesh of one dimension; None is all
            ranks, or for a layer that is synchronized already the group it has.
        group_size: Ranks that share a batch, in place of ``process_group``: groups of so many
            neighboring ranks, or "node" for those of a machine, LOCAL_WORLD_SIZE. All ranks make
            the groups in the first conversion with a size; later ones share them. 1 is local.

    Returns:
        ``module``, or the new layer where ``module`` is an ordinary batch normalization layer.

    Raises:
        TypeError: ``module`` is not a module, ``process_group`` not a group or ``group_size`` not a
            number.
        ValueError: A lazy layer does not know its number of channels yet, a layer has been compiled
            by itself, or ``fuse_modules_qat`` has been called and ``prepare_qat`` not yet;
            ``group_size`` together with ``process_group``, no divisor of the number of ranks, not
            the same on all of them, or "node" without LOCAL_WORLD_SIZE.
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
    layers, left_alone = _modules_to_visit(module, _has_no_sync_class)
    for name, layer in layers + left_alone:
        if isinstance(layer, LazyModuleMixin) and isinstance(layer, BatchNormBase):
            raise ValueError(
                f"the layer {name!r} is a {type(layer).__name__} that does not know its number of "
                "channels yet; run one batch through the model before converting it"
            )
    _check_not_compiled(layers, lambda layer: _sync_class(layer) is not None)
    _check_not_awaiting_quantization(layers)

    def convert(layer: nn.Module, name: str) -> nn.Module:
        if isinstance(layer, SyncBatchNorm):
            layer._name = name or layer._name
            if process_group is not None:
                layer.process_group = process_group
            return layer
        target = _sync_class(layer)
        if target is None:
            return layer
        new: SyncBatchNorm = _torch_private.with_class(layer, target)
        new._name = name
        held = new.__dict__.pop("process_group", None)  # by torch's layer
        new.process_group = held if process_group is None else process_group
        if target is SyncBatchNorm and not isinstance(layer, TorchSyncBatchNorm):
            new._converted_from = type(layer)
        if target._takes_activation:
            _set_missing(new, _FOLLOWING)
        return new

    converted = _replace(module, layers, convert)
    for name, layer in left_alone:
        synchronizes = "stays torch's" if _is_synchronized(layer) else "does not synchronize"
        warnings.warn(_left_alone_message(layer, name, synchronizes), stacklevel=2)
    return converted


@overload
def revert_sync_batchnorm(module: BatchNormBase) -> BatchNormBase: ...


@overload
def revert_sync_batchnorm(module: ModuleT) -> ModuleT: ...


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace a model's synchronized batch normalization layers by ordinary ones.

    The inverse of :func:`convert_sync_batchnorm` and :func:`fuse_activations`, for export,
    inference and debugging on one device: a converted layer gets its class back; one that was built
    as a SyncBatchNorm, ours or torch's, or has an activation of its own becomes a batch
    normalization of any number of dimensions, with that activation. Fused activations are
    modules and calls again.

    Args:
        module: The model; changed in place. A synchronized layer itself is left as it is.

    Returns:
        ``module``, or the new layer where ``module`` is a synchronized layer.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: A layer, or a module whose code is fused, has been compiled by itself. Nothing
            has been changed then.

    Example:
        >>> from torch import nn
        >>> from syncbn import convert_sync_batchnorm, revert_sync_batchnorm
        >>> type(revert_sync_batchnorm(convert_sync_batchnorm(nn.BatchNorm2d(8)))).__name__
        'BatchNorm2d'
    """
    check_module(module)
    layers, left_alone = _modules_to_visit(
        module, lambda layer: _is_synchronized(layer) and not _is_plain(layer)
    )

    def is_replaced(layer: nn.Module) -> bool:
        is_layer = _is_synchronized(layer) and _is_plain(layer)
        return is_layer or isinstance(layer, fused.FusedBlock)

    _check_not_compiled(layers, is_replaced)
    fused.unfuse(module)

    def revert(layer: nn.Module, name: str) -> nn.Module:
        if not _is_synchronized(layer):
            return layer
        cls = getattr(layer, "_converted_from", None)
        if cls is None or _has_activation(layer):
            cls = BatchNorm
        new: nn.Module = _torch_private.with_class(layer, cls)
        for attribute in _ATTRIBUTES if cls is BatchNorm else (*_ATTRIBUTES, *_FOLLOWING):
            new.__dict__.pop(attribute, None)
        if cls is BatchNorm:
            _set_missing(new, _FOLLOWING)
        return new

    reverted = _replace(module, layers, revert)
    for name, layer in left_alone:
        warnings.warn(_left_alone_message(layer, name, "still synchronizes"), stacklevel=2)
    return reverted


def check_module(module: object) -> None:
    """Raise TypeError unless it is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(module).__name__}")


def _modules_to_visit(
    root: nn.Module, is_left_alone: Callable[[nn.Module], bool]
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
        if is_left_alone(module):
            left_alone.append((name, module))
            return
        layers.append((name, module))
        for child_name, child in _torch_private.children(module).items():
            if child is not None:
                visit(child, f"{name}.{child_name}" if name else child_name)

    visit(root, "")
    return layers, left_alone


def _check_not_compiled(layers: Layers, is_replaced: Callable[[nn.Module], bool]) -> None:
    """Raise ValueError where code of a layer that is replaced would go on to run."""
    for name, layer in layers:
        compiled = _torch_private.compiled_original(layer)
        own_code = _torch_private.is_compiled(layer) and is_replaced(layer)
        if own_code or (compiled is not None and is_replaced(compiled)):
            raise ValueError(
                f"the layer {name!r} has been compiled by itself, so that its old code would go on "
                "to run; convert or revert the model first and compile after that"
            )


def _set_missing(layer: nn.Module, attributes: dict[str, Any]) -> None:
    for attribute, value in attributes.items():
        if not hasattr(layer, attribute):
            setattr(layer, attribute, value)


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


def _has_activation(layer: nn.Module) -> bool:
    """Whether a layer of ours has an activation of its own."""
    is_ours = isinstance(layer, SyncBatchNorm) and layer._takes_activation
    return is_ours and layer.activation is not None


def _is_synchronized(layer: nn.Module) -> bool:
    return isinstance(layer, (SyncBatchNorm, TorchSyncBatchNorm))


def _left_alone_message(layer: nn.Module, name: str, consequence: str) -> str:
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


def _sync_class(layer: nn.Module) -> type[SyncBatchNorm] | None:
    """Return the class that does what this layer does, synchronized; None if there is none."""
    if not isinstance(layer, BatchNormBase) or isinstance(layer, SyncBatchNorm):
        return None
    if "forward" in vars(layer):  # replaced on the instance
        return None
    timms = _timms_class(layer)
    if timms is not None:
        return subclasses.derive(SyncBatchNormAct, timms)
    if isinstance(layer, TorchSyncBatchNorm):
        return SyncBatchNorm if _is_plain(layer) else None
    inside = (module for module in layer.modules() if module is not layer)
    if any(isinstance(module, BatchNormBase) for module in inside):
        return None  # which normalizes a part by itself
    return subclasses.synchronized(layer)


def _has_no_sync_class(layer: nn.Module) -> bool:
    """Whether the layer normalizes batches in a way that none of our classes does."""
    is_other = isinstance(layer, BatchNormBase) and not isinstance(layer, SyncBatchNorm)
    return is_other and _sync_class(layer) is None


def _timms_class(layer: nn.Module) -> type[nn.Module] | None:
    """Return timm's ``BatchNormAct2d`` if the layer is one or was one before timm's converter."""
    cls, children = type(layer), _torch_private.children(layer)
    if cls.__module__.startswith("timm.") and {"drop", "act"} <= children.keys():
        if cls.__name__ == "BatchNormAct2d":
            return cls
        if cls.__name__ == "SyncBatchNormAct":
            return getattr(sys.modules[cls.__module__], "BatchNormAct2d", None)
    return None


def _replace(
    root: nn.Module, layers: Layers, replacement: Callable[[nn.Module, str], nn.Module]
) -> nn.Module:
    """Replace each of the layers by ``replacement(layer, name)`` in its parent modules."""
    replaced = {id(layer): replacement(layer, name) for name, layer in layers}
    for new in replaced.values():
        children = _torch_private.children(new)
        for name, child in children.items():
            if child is not None:
                children[name] = replaced.get(id(child), child)
    return replaced.get(id(root), root)
