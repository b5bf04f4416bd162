"""The modules and functions that a fused model consists of, and the way back.

In a Sequential the layer gets the activation, and an identity replaces the activation. A module
with fused code runs a graph that calls the functions of this file. Its layers do not change,
because other code may call them too.
"""

import types
from typing import Any, TypeGuard

import torch
import torch.fx
from torch import Tensor, nn

from syncbn import _compat
from syncbn.conversion.classes import reduce_as, set_class
from syncbn.modules import SyncBatchNorm
from syncbn.ops import epilogue
from syncbn.pickles import RECONSTRUCTIONS, _reconstruct


class FusedActivation(nn.Identity):
    """Replaces an activation that the layer before it applies."""

    def __init__(self, layer: SyncBatchNorm, activation: nn.Module) -> None:
        super().__init__()
        self.training = activation.training
        # The layer, the activation, and the slope that the layer had before. modules() and
        # state_dict() do not look into a tuple.
        self.fused = (layer, activation, layer.negative_slope)

    def extra_repr(self) -> str:
        """Return the activation."""
        return repr(self.fused[1])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reconstruct, ("fused_activation",), vars(self)

    def _syncbn_undo(self) -> nn.Module:
        layer, activation, negative_slope = self.fused
        vars(layer).update(activation=None, negative_slope=negative_slope)
        return activation.train(self.training)


def is_bare(layer: nn.Module) -> TypeGuard[SyncBatchNorm]:
    """Whether a call of the layer normalizes and does nothing else."""
    is_ours = type(layer).forward is SyncBatchNorm.forward
    return is_ours and layer.activation is None and _compat.does_as_its_class(layer)


# Graphs call these functions. Their arguments may have changed since the graph was made: modules
# may have got hooks or been replaced, and shapes are known only here. An ``activation`` is a
# module, or the name and slope of a function.

Activation = nn.Module | tuple[str, float]


def normalize_activate(layer: nn.Module, input: Tensor, activation: Activation) -> Tensor:
    """Return ``activation(layer(input))``, in the layer's own passes if it is ours and bare."""
    known = _known(activation)
    if known is not None and is_bare(layer):
        return layer._syncbn_forward(input, None, *known)
    return _activate(layer(input), activation)


def normalize_add_activate(
    layer: nn.Module, input: Tensor, addend: Any, sum: str, activation: Activation
) -> Tensor:
    """Return ``activation(layer(input) + addend)``, as :func:`normalize_activate`.

    The layer takes an addend that is a residual by shape, dtype and type. Another one is added as
    in the code: ``sum`` is "layer + addend", "addend + layer" or "layer += addend". The first
    operand decides the memory format of the result; ``+=`` broadcasts and promotes only the addend.
    """
    known = _known(activation)
    is_residual = _is_residual(addend, input, is_first=sum == "addend + layer")
    if known is not None and is_residual and is_bare(layer):
        return layer._syncbn_forward(input, addend, *known)
    output = layer(input)
    if sum == "layer += addend":
        output += addend
    elif sum == "layer + addend":
        output = output + addend
    elif sum == "addend + layer":
        output = addend + output
    else:
        raise ValueError(f"expected a sum of layer and addend, but got {sum!r}")
    return _activate(output, activation)


def _known(activation: Activation) -> tuple[str, float] | None:
    return activation if isinstance(activation, tuple) else epilogue.of_module(activation)


def _activate(output: Tensor, activation: Activation) -> Tensor:
    if isinstance(activation, tuple):
        return epilogue.activate(output, *activation)
    activated: Tensor = activation(output)
    return activated


def _is_residual(addend: Any, input: Tensor, is_first: bool) -> bool:
    return (
        isinstance(addend, Tensor)
        and isinstance(input, Tensor)
        and addend.shape == input.shape
        and addend.dtype == input.dtype
        and addend.device == input.device
        and addend.layout == torch.strided
        and not addend.is_nested
        and (not is_first or addend.stride() == input.stride())
    )


# A tracer of a fused model records the calls.
torch.fx.wrap("normalize_activate")
torch.fx.wrap("normalize_add_activate")


class FusedModule(nn.Module):
    """A module that runs a graph in place of its class's forward.

    It is the same object as before, under a class that derives from this one and from its own:
    methods, attributes, hooks and references to it remain. Copies and pickles hold the original
    class and the attributes; :mod:`syncbn.fusion.fuse` traces the graph again from them.
    """

    _syncbn_original: type[nn.Module]
    _syncbn_code: str  # of the graph

    def __init_subclass__(cls) -> None:
        """Call no base class, which may keep a list of the subclasses that a program defines."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as the original class does. Loading the pickle fuses the module again."""
        if self._syncbn_has_other_class():
            return super().__reduce_ex__(protocol)
        reduced = reduce_as(self, self._syncbn_original, protocol)
        if isinstance(reduced, str):  # the name of an object that exists
            return reduced
        make, arguments, *state = reduced
        return _reconstruct, ("fused", make, arguments), *state

    def _syncbn_has_other_class(self) -> bool:
        """Whether other code, such as fully_shard, has derived a class from the fused one."""
        return "_syncbn_code" not in vars(type(self))

    def _syncbn_undo(self) -> nn.Module:
        if self._syncbn_has_other_class():
            raise ValueError(
                f"a {self._syncbn_original.__name__} has been fused, and then other code has "
                f"changed its class to {type(self).__name__}, which would be lost; revert the "
                "model before that"
            )
        set_class(self, self._syncbn_original)
        return self


def fused_class(cls: type[nn.Module], **names: Any) -> type[FusedModule]:
    """Return a class that derives from ``cls`` and has the attributes ``names``."""
    names |= {"__module__": cls.__module__, "_syncbn_original": cls}
    name = f"Fused{cls.__name__}"
    return types.new_class(name, (FusedModule, cls), exec_body=lambda body: body.update(names))


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module has when it is not fused."""
    return module._syncbn_original if isinstance(module, FusedModule) else type(module)


RECONSTRUCTIONS["fused_activation"] = lambda: nn.Module.__new__(FusedActivation)
