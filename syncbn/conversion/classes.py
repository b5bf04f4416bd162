"""Another class for a module, and its old one where conversion fails."""

import contextlib
import copyreg
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from syncbn import _compat


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make a module one of class ``cls``, without its class's own ``__setattr__``."""
    object.__setattr__(module, "__class__", cls)


@contextlib.contextmanager
def restored_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules their classes, attributes and children back if an error is raised."""
    held = [
        (module, type(module), dict(vars(module)), dict(_compat.children(module)))
        for module in modules
        if not isinstance(module, torch.jit.ScriptModule)  # which nobody changes
    ]
    try:
        yield
    except BaseException:
        for module, cls, attributes, children in held:
            if type(module) is not cls:
                set_class(module, cls)
            vars(module).clear()
            vars(module).update(attributes)
            _compat.children(module).clear()
            _compat.children(module).update(children)
        raise


def reduce_as(module: nn.Module, cls: type[nn.Module], protocol: Any) -> Any:
    """Return what ``__reduce_ex__`` would return if the module were one of class ``cls``."""
    twin = object.__new__(cls)
    object.__setattr__(twin, "__dict__", vars(module))
    for name in copyreg._slotnames(cls):  # type: ignore[attr-defined]
        if hasattr(module, name):
            object.__setattr__(twin, name, getattr(module, name))
    return twin.__reduce_ex__(protocol)
