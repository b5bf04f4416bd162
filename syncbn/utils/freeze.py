"""Layers that stay in evaluation: freeze_statistics() and unfreeze_statistics()."""

from torch import nn

from syncbn._compat import check_module
from syncbn.modules import SyncBatchNorm


def layers_of(model: nn.Module) -> dict[str, SyncBatchNorm]:
    """Return our layers in a model by their names in it, each once.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no layer of ours.
    """
    check_module(model)
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)
    }
    if not layers:
        raise ValueError(
            "expected a model with SyncBatchNorm layers of syncbn, but this "
            f"{type(model).__name__} has none; call syncbn.convert_sync_batchnorm first"
        )
    return layers


def freeze_statistics(model: nn.Module, affine: bool = False) -> None:
    """Keep a model's :class:`syncbn.SyncBatchNorm` layers in evaluation, for fine-tuning.

    They normalize by their running statistics, do not update them and make no collective, until
    :func:`unfreeze_statistics`; ``model.train()`` does not change their mode, and
    ``reset_running_stats()``, which ``update_bn`` calls, only warns. Copies and pickles are frozen
    too; a state_dict does not show it. Layers without running statistics are skipped. Of several
    calls the last one decides.

    Args:
        model: The model; its layers are changed in place. Other classes' layers are not.
        affine: Freeze weight and bias of the layers, too: ``requires_grad`` is then False.
            Otherwise they are trained.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no layer of ours, or none with running statistics.

    Example:
        >>> from torch import nn
        >>> from syncbn import SyncBatchNorm, freeze_statistics
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), SyncBatchNorm(8))
        >>> freeze_statistics(model)
        >>> [module.training for module in model.train()]
        [True, False]
    """
    layers = [
        layer
        for layer in layers_of(model).values()
        if layer.running_mean is not None and layer.running_var is not None
    ]
    if not layers:
        raise ValueError(
            "expected SyncBatchNorm layers with running statistics to freeze, but all of this "
            f"{type(model).__name__} have track_running_stats=False"
        )
    # All flags are read before one is set: layers may share a weight.
    flags = [_flags(layer) for layer in layers]
    for layer, own in zip(layers, flags, strict=True):
        before = layer._syncbn.frozen or {"training": layer.training}
        if affine:
            frozen = {**own, **before}
            _set_flags(layer, dict.fromkeys(own, False))
        else:
            frozen = {"training": before["training"]}
            _set_flags(layer, before)
        layer.__dict__["_syncbn"] = layer._syncbn.replaced(frozen=frozen)
        layer.training = False


def unfreeze_statistics(model: nn.Module) -> None:
    """Undo :func:`freeze_statistics`.

    A layer gets the mode of the last ``train()`` or ``eval()``; without one, its mode before it was
    frozen. Weight and bias get back their ``requires_grad``. Other layers are skipped.

    Args:
        model: The model; its layers are changed in place.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no layer of ours.

    Example:
        >>> from torch import nn
        >>> from syncbn import SyncBatchNorm, freeze_statistics, unfreeze_statistics
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), SyncBatchNorm(8))
        >>> freeze_statistics(model)
        >>> unfreeze_statistics(model)
        >>> model[1].training
        True
    """
    for layer in layers_of(model).values():
        before = layer._syncbn.frozen
        if before is not None:
            layer.__dict__["_syncbn"] = layer._syncbn.replaced(frozen=None)
            layer.training = before["training"]
            _set_flags(layer, before)


def _flags(layer: SyncBatchNorm) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in _parameters(layer).items()}


def _set_flags(layer: SyncBatchNorm, flags: dict[str, bool]) -> None:
    for name, parameter in _parameters(layer).items():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))


# The parameters that weight and bias are, or are made of by torch.nn.utils.prune and .parametrize.
_AFFINE = ("weight", "bias", "weight_orig", "bias_orig")
_PARAMETRIZED = ("parametrizations.weight.", "parametrizations.bias.")


def _parameters(layer: SyncBatchNorm) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in layer.named_parameters(remove_duplicate=False)
        if name in _AFFINE or name.startswith(_PARAMETRIZED)
    }
