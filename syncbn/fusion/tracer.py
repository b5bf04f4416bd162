"""torch.fx's tracer for one block: children are calls, and what a graph would lose is refused."""

import operator
import sys
from collections.abc import Collection
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx.proxy import Attribute
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from syncbn import _compat

__all__ = ["IN_PLACE_OPERATORS", "BlockTracer", "OnlyRecorded", "Untraceable"]


class Untraceable(Exception):
    """Why the graph of a block would not do what its code does."""


class BlockTracer(torch.fx.Tracer):
    """Records the calls of children, but those ``opened``, whose own calls it records."""

    def __init__(self, opened: Collection[nn.Module] = ()) -> None:
        super().__init__()
        self.opened = opened
        self.contexts = _contexts()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return False for those opened."""
        return m not in self.opened

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Record an operation, or raise Untraceable where a context changes what it does."""
        if _contexts() != self.contexts:
            raise Untraceable("its code sets a mode (no_grad, autocast, checkpoint) for a part")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Record a value, or raise Untraceable where the graph would make another kind of it."""
        if isinstance(a, (dict, list)) and type(a) not in (dict, list):
            raise Untraceable(f"its code makes a {type(a).__name__}, of which torch.fx keeps less")
        return super().create_arg(a)

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        """Return the stand-in for a value."""
        return _Value(node, self)


class OnlyRecorded(TorchFunctionMode):
    """Refuses torch functions of no stand-in, whose results a graph would keep as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or raise Untraceable."""
        kwargs = kwargs or {}
        if not any(type(value) in (_Value, _Attribute) for value in tree_leaves((args, kwargs))):
            name = getattr(func, "__name__", str(func))
            raise Untraceable(f"its code calls {name}, whose result its graph would keep")
        return func(*args, **kwargs)


class _StandIn:
    """What torch.fx's own stand-ins for tensors lack: they answer what they cannot know."""

    def __getattr__(self, name: str) -> Any:
        if not hasattr(torch.Tensor, name):
            raise Untraceable(f"its code asks for {name!r}, which a tensor does not have")
        return _Attribute(self, name)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        if not _is_torch_calling():
            raise Untraceable(f"its code sets {name!r} of a tensor")
        object.__setattr__(self, name, value)

    @property  # type: ignore[misc]  # which object has as an attribute
    def __class__(self) -> Any:
        """The class, for torch.fx. Others ask by isinstance whether this is a tensor."""
        if not _is_torch_calling():
            raise Untraceable("its code asks of what type a value is")
        return type(self)


def _is_torch_calling() -> bool:
    """Whether torch's code, or that of this file, is what called the caller."""
    module: str = sys._getframe(2).f_globals.get("__name__", "")
    return module.startswith(("torch.", __name__))


def _recorded(function: Any) -> Any:
    def record(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


# operator.iadd and the like, which have a partner such as operator.add.
IN_PLACE_OPERATORS = {
    name: getattr(operator, name)
    for name in dir(operator)
    if name.startswith("__i") and f"__{name[3:]}" in dir(operator)
}
for _name, _operator in IN_PLACE_OPERATORS.items():
    setattr(_StandIn, _name, _recorded(_operator))


class _Value(_StandIn, torch.fx.Proxy):
    pass


class _Attribute(_StandIn, Attribute):
    pass


def _contexts() -> tuple[Any, ...]:
    """Return what context managers set that graphs do not hold."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
        _compat.saved_tensors_hooks(),
    )
