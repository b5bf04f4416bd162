"""torch.fx's tracer for one block: children are calls, and what a graph would lose is refused."""

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx.proxy import Attribute

from syncbn import _torch_private

__all__ = ["BlockTracer", "Untraceable"]


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


class _InPlace:
    """Operators such as ``+=``, which torch.fx's own stand-ins record as ``+``."""

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)  # type: ignore[arg-type]


def _recorded(function: Any) -> Any:
    def record(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


for _name in dir(operator):
    if _name.startswith("__i") and f"__{_name[3:]}" in dir(operator):  # __iadd__ beside __add__
        setattr(_InPlace, _name, _recorded(getattr(operator, _name)))


class _Value(_InPlace, torch.fx.Proxy):
    pass


class _Attribute(_InPlace, Attribute):
    pass


def _contexts() -> tuple[Any, ...]:
    """Return what context managers set that graphs do not hold."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
        _torch_private.saved_tensors_hooks(),
    )
