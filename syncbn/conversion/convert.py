"""Conversion of a model's batch normalization layers, and the way back."""

import types
import warnings
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import nn

# From its own module: a program may have bound the name in torch.nn to something else.
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from syncbn import _compat
from syncbn._compat import BatchNormBase
from syncbn.batch_norm import BatchNorm
from syncbn.conversion.classes import restored_on_error, set_class
from syncbn.conversion.derived import (
    EPILOGUE,
    SYNCHRONIZED,
    cannot_take_its_place,
    has_own_methods,
    sync_class,
)
from syncbn.distributed import collectives, groups
from syncbn.distributed.collectives import DeviceMesh, ProcessGroup
from syncbn.layer_state import LayerState
from syncbn.modules import ModuleT, SyncBatchNorm

Layers = list[tuple[str, nn.Module]]  # with their names in the model

# The class names that TorchScript keeps of batch normalization layers.
_SCRIPTED = {"BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"}


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
    by that, with all its children; it skips scripted modules too. A warning names each. A
    ``forward`` of torch's that the program has bound before, and does not keep as an attribute of a
    module, warns when it trains; one of a subclass that computes by itself does not.

    Converted layers are copied and pickled as those of their class, and ``type(layer)(...)`` takes
    the arguments of that. The class that conversion has made cannot be pickled itself.

    Convert a model as a whole. A layer gets its name in ``module``, and by the names ranks notice
    that they run layers in another order: layers that are converted one by one have none.

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
            number; the class of a layer does not let a class derive from it, or take its place.
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
    classes = [sync_class(layer, name) for name, layer in layers]
    with restored_on_error(layer for _, layer in layers):
        for (name, layer), cls in zip(layers, classes, strict=True):
            try:
                _synchronize(layer, cls, name, process_group)
            except Exception as error:
                raise cannot_take_its_place(layer, name, error) from error
        _bind_forward_again(layers)
        for name, layer in skipped:
            consequence = "stays torch's" if _is_synchronized(layer) else "does not synchronize"
            warnings.warn(_skip_message(layer, name, consequence), stacklevel=2)
        converted = {base for cls in classes if cls is not None for base in cls.__mro__}
        for torchs in SYNCHRONIZED:
            if torchs in converted and not _compat.is_code_of_batch_norm(torchs.forward):
                warnings.warn(
                    f"torch.nn.{torchs.__name__}.forward is not torch's own, but "
                    f"{torchs.forward!r}; converted layers do not run it",
                    stacklevel=2,
                )
    return module


def _synchronize(
    layer: nn.Module, cls: type[SyncBatchNorm] | None, name: str, group: ProcessGroup | None
) -> None:
    """Make a layer one of class ``cls``; give one that synchronizes already its name and group."""
    attributes = vars(layer)
    if isinstance(layer, SyncBatchNorm):
        state = layer._syncbn.with_name(name) if name else layer._syncbn
        attributes["_syncbn"] = state if group is None else state.with_group(group)
    elif cls is not None:
        held = collectives.group_of_mesh(attributes.get("process_group"))
        if isinstance(layer, TorchSyncBatchNorm):
            del attributes["process_group"]
        set_class(layer, cls)
        attributes["_syncbn"] = LayerState(name).with_group(held if group is None else group)
        if cls._syncbn_takes_activation:
            for attribute, value in EPILOGUE.items():
                attributes.setdefault(attribute, value)


def _bind_forward_again(layers: Layers) -> None:
    """Renew the attributes of modules that hold a layer's ``forward``, bound with its old code."""
    for _, module in layers:
        for attribute, value in vars(module).items():
            # A method of a callable object may have no name.
            is_method = isinstance(value, types.MethodType)
            if is_method and getattr(value, "__name__", "") == "forward":
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
        TypeError: ``module`` is not a module, or a layer cannot get its class back.
        ValueError: A module whose code is fused has been compiled by itself, or has got another
            class, as by fully_shard.

    Nothing has been changed where an error is raised.

    Example:
        >>> from torch import nn
        >>> from syncbn import convert_sync_batchnorm, revert_sync_batchnorm
        >>> type(revert_sync_batchnorm(convert_sync_batchnorm(nn.BatchNorm2d(8)))).__name__
        'BatchNorm2d'
    """
    _compat.check_module(module)
    layers, skipped = _modules_to_visit(
        module, lambda layer, _: _is_synchronized(layer) and has_own_methods(layer)
    )
    for name, layer in layers:
        block = _compat.compiled_original(layer) or layer
        if _is_fused(block) and (block is not layer or _compat.is_compiled(block)):
            raise ValueError(
                f"the module {name!r} has been fused and then compiled by itself, so that its old "
                "code would go on to run; revert the model first and compile after that"
            )
    with restored_on_error(list(module.modules())):
        _undo_fusion(module)
        for name, layer in layers:
            try:
                _desynchronize(layer)
            except Exception as error:
                raise TypeError(
                    f"the layer {name!r} is a {type(layer).__name__} and cannot get its class "
                    f"back: {type(error).__name__}: {error}"
                ) from error
        _bind_forward_again(layers)
        for name, layer in skipped:
            warnings.warn(_skip_message(layer, name, "still synchronizes"), stacklevel=2)
    return module


def _desynchronize(layer: nn.Module) -> None:
    """Give a layer the class that it had before conversion, or that of a reverted layer."""
    attributes = vars(layer)
    cls: type[BatchNormBase] = BatchNorm
    if isinstance(layer, SyncBatchNorm):
        cls = layer._syncbn_original
        if layer._syncbn_takes_activation:
            if layer.activation is not None:
                cls = BatchNorm
            elif cls is not BatchNorm:
                for attribute in EPILOGUE:
                    attributes.pop(attribute, None)
        del attributes["_syncbn"]
    elif isinstance(layer, TorchSyncBatchNorm):
        attributes.pop("process_group", None)
        attributes.update(EPILOGUE)
    else:
        return
    set_class(layer, cls)


def _is_fused(module: nn.Module | None) -> bool:
    """Whether fusion has made the module, which then has a method that returns the original one."""
    return hasattr(type(module), "_syncbn_undo")


def _undo_fusion(model: Any) -> None:
    for module in list(model.modules()):
        if _is_fused(module):
            module._syncbn_undo()
        children: dict[str, Any] = _compat.children(module)
        for name, child in children.items():
            if _is_fused(child):
                children[name] = child._syncbn_undo()


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


def _cannot_synchronize(layer: nn.Module, name: str) -> bool:
    """Whether the layer normalizes batches in a way that none of our classes does."""
    if isinstance(layer, torch.jit.ScriptModule):
        scripted = (getattr(module, "original_name", "") for module in layer.modules())
        return any(name in _SCRIPTED for name in scripted)
    is_other = isinstance(layer, BatchNormBase) and not isinstance(layer, SyncBatchNorm)
    return is_other and sync_class(layer, name) is None


SyncBatchNorm._syncbn_converter = staticmethod(convert_sync_batchnorm)
