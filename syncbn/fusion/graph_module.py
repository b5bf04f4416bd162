"""What a fused model is made of, and the way back.

In a Sequential the layer gets the activation, whose place an identity takes. In code the block gets
a graph that calls the functions of this file; the layers themselves stay as they are, so that
whatever else calls them gets what it got before.
"""

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from syncbn import _compat
from syncbn.fusion.tracer import BlockTracer
from syncbn.modules import SyncBatchNorm
from syncbn.ops import epilogue

__all__ = [
    "FusedActivation",
    "FusedBlock",
    "class_of_block",
    "fused_class",
    "is_bare",
    "normalize_activate",
    "normalize_add_activate",
    "run_graph",
]


class FusedActivation(nn.Identity):
    """The place of an activation that the layer before it applies."""

    def __init__(self, layer: SyncBatchNorm, activation: nn.Module) -> None:
        super().__init__()
        self.training = activation.training
        # In a tuple, which modules() and state_dict() do not look into; and the slope that the
        # layer had before.
        self.fused = (layer, activation, layer.negative_slope)

    def extra_repr(self) -> str:
        """Return the activation."""
        return repr(self.fused[1])

    def _syncbn_undo(self) -> nn.Module:
        layer, activation, negative_slope = self.fused
        layer.activation, layer.negative_slope = None, negative_slope
        return activation.train(self.training)


def is_bare(layer: nn.Module) -> bool:
    """Whether a call of the layer normalizes and does nothing else."""
    is_ours = type(layer).forward is SyncBatchNorm.forward
    is_free = is_ours and layer.activation is None
    return is_free and _compat.does_as_its_class(layer)


# Called by the graphs of blocks. What they are given may have changed since the graph was made:
# modules may have got hooks or been replaced, and shapes are known only here. An ``activation`` is
# a module, or the name and slope of a function.

Activation = nn.Module | tuple[str, float]


def normalize_activate(layer: nn.Module, input: Tensor, activation: Activation) -> Tensor:
    """Return ``activation(layer(input))``, in the layer's own passes where it is ours and bare."""
    known = _known(activation)
    if known is not None and is_bare(layer):
        return layer._syncbn_forward(  # type: ignore[operator, no-any-return]
            input, None, *known
        )
    return _activate(layer(input), activation)


def normalize_add_activate(
    layer: nn.Module, input: Tensor, summand: Any, sum: str, activation: Activation
) -> Tensor:
    """Return ``activation(layer(input) + summand)``, as :func:`normalize_activate`.

    A summand that is no residual, by its shape, dtype or type, is added as the code adds it, which
    ``sum`` tells: "layer + summand", "summand + layer" or "layer += summand". The first of two
    says how the result lies in memory; ``+=`` broadcasts and promotes the summand alone.
    """
    known = _known(activation)
    is_residual = _is_residual(summand, input, is_first=sum == "summand + layer")
    if known is not None and is_residual and is_bare(layer):
        return layer._syncbn_forward(  # type: ignore[operator, no-any-return]
            input, summand, *known
        )
    output = layer(input)
    if sum == "layer += summand":
        output += summand
    else:
        output = output + summand if sum == "layer + summand" else summand + output
    return _activate(output, activation)


def _known(activation: Activation) -> tuple[str, float] | None:
    if isinstance(activation, tuple):
        return activation
    return epilogue.of_module(activation)


def _activate(output: Tensor, activation: Activation) -> Tensor:
    if isinstance(activation, tuple):
        return epilogue.activate(output, *activation)
    activated: Tensor = activation(output)
    return activated


def _is_residual(summand: Any, input: Tensor, is_first: bool) -> bool:
    return (
        isinstance(summand, Tensor)
        and isinstance(input, Tensor)
        and summand.shape == input.shape
        and summand.dtype == input.dtype
        and summand.device == input.device
        and summand.layout == torch.strided
        and not summand.is_nested
        and (not is_first or summand.stride() == input.stride())
    )


# A tracer of a fused model records the calls.
torch.fx.wrap("normalize_activate")
torch.fx.wrap("normalize_add_activate")


class FusedBlock(torch.fx.GraphModule):
    """A block that runs a graph in the place of its class's forward.

    It is the block itself, under a class that derives from this one and from its own: methods,
    attributes, hooks and all that hold it go on. Copies and pickles keep all of that, too, where
    those of a GraphModule keep what the graph uses.
    """

    unfused_class: type[nn.Module]

    def __str__(self) -> str:
        return repr(self)  # as other modules, without the code

    def _syncbn_undo(self) -> nn.Module:
        self.__class__ = self.unfused_class  # type: ignore[assignment]
        for name in graph_attributes():
            self.__dict__.pop(name, None)
        return self

    def __copy__(self) -> "FusedBlock":
        new: FusedBlock = nn.Module.__new__(fused_class(self.unfused_class))
        new.__dict__.update(self.__dict__)
        new.graph = copy.deepcopy(self.graph)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedBlock":
        new: FusedBlock = nn.Module.__new__(fused_class(self.unfused_class))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new.graph = copy.deepcopy(self.graph, memo)
        return new

    def __reduce__(self) -> Any:
        load, (state, imports) = super().__reduce__()
        return _load_block, (self.unfused_class, load, state, imports)


def _load_block(
    cls: type[nn.Module], load: Callable[..., Any], state: dict[str, Any], imports: str
) -> FusedBlock:
    new: FusedBlock = nn.Module.__new__(fused_class(cls))
    new.__dict__.update(state)
    new.graph = load(dict(state), imports).graph
    return new


def fused_class(cls: type[nn.Module]) -> type[FusedBlock]:
    """Return a class for one block of class ``cls``: a graph's code is a method of its class."""
    names = {"__module__": cls.__module__, "unfused_class": cls}
    name = f"Fused{cls.__name__}"
    return types.new_class(name, (FusedBlock, cls), exec_body=lambda body: body.update(names))


def class_of_block(block: nn.Module) -> type[nn.Module]:
    """Return the class that the block has when it is not fused."""
    return block.unfused_class if isinstance(block, FusedBlock) else type(block)


def run_graph(block: nn.Module, cls: type[FusedBlock], graph: torch.fx.Graph) -> None:
    """Make the block, of the class ``cls`` from now on, run the graph."""
    block.__dict__.update(graph_attributes())
    block.__class__ = cls
    block.graph = graph  # type: ignore[assignment]


def graph_attributes() -> dict[str, Any]:
    """Return the attributes that a GraphModule has and other modules have not."""
    new = torch.fx.GraphModule(nn.Module(), torch.fx.Graph(tracer_cls=BlockTracer))
    return {name: value for name, value in vars(new).items() if name not in vars(nn.Module())}
