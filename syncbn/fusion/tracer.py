"""torch.fx's tracer for one module, strict where a graph would not do the same as the code."""

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx.proxy import Attribute
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from syncbn import _compat


class TraceError(Exception):
    """Why the graph of a module would not do the same as its code."""


class ModuleTracer(torch.fx.Tracer):
    """Records the calls of children. Of the ``inlined`` ones it records their children's calls."""

    def __init__(self, inlined: Collection[nn.Module] = ()) -> None:
        super().__init__()
        self.inlined = inlined
        self.contexts = _contexts()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the call of a module is one node."""
        return m not in self.inlined

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Record an operation, or raise TraceError if a context changes its result."""
        if _contexts() != self.contexts:
            raise TraceError("its code sets a mode (no_grad, autocast, checkpoint) for a part")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Record a value, or raise TraceError if the graph would make another kind of it."""
        if type(a) in (_Value, _Attribute):
            return a.node  # before torch.fx asks for its class
        if isinstance(a, (dict, list)) and type(a) not in (dict, list):
            raise TraceError(f"its code makes a {type(a).__name__}, of which torch.fx keeps less")
        return super().create_arg(a)

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        """Return the proxy of a value."""
        return _Value(node, self)


class OnlyRecorded(TorchFunctionMode):
    """Refuses torch functions without a proxy: the graph would keep their results as constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or raise TraceError."""
        kwargs = kwargs or {}
        if not any(type(value) in (_Value, _Attribute) for value in tree_leaves((args, kwargs))):
            name = getattr(func, "__name__", str(func))
            raise TraceError(f"its code calls {name}, whose result its graph would keep")
        return func(*args, **kwargs)


class _StrictProxy:
    """Makes torch.fx's proxies raise TraceError where their answer could be wrong."""

    def __getattr__(self, name: str) -> Any:
        if not hasattr(torch.Tensor, name):
            raise TraceError(f"its code asks for {name!r}, which a tensor does not have")
        return _Attribute(self, name)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _compat.PROXY_ATTRIBUTES:
            raise TraceError(f"its code sets {name!r} of a tensor")
        object.__setattr__(self, name, value)

    @property  # type: ignore[misc]  # object has it as an attribute
    def __class__(self) -> Any:
        """isinstance() gets the class here; torch asks too if code keeps the value in a module."""
        raise TraceError("its code asks for the type of a value, or keeps the value in a module")


def _recorded(function: Any) -> Any:
    def record(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


# operator.iadd and the like. torch.fx records their partners, operator.add and the like.
IN_PLACE_OPERATORS = {
    name: getattr(operator, name)
    for name in dir(operator)
    if name.startswith("__i") and f"__{name[3:]}" in dir(operator)
}
for _name, _operator in IN_PLACE_OPERATORS.items():
    setattr(_StrictProxy, _name, _recorded(_operator))


class _Value(_StrictProxy, torch.fx.Proxy):
    pass


class _Attribute(_StrictProxy, Attribute):
    pass


def _contexts() -> tuple[Any, ...]:
    """Return the settings of context managers that graphs do not hold."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
        _compat.saved_tensors_hooks(),
    )
