"""Whether a graph could take the place of the code of a block's class."""

import inspect
import types
from typing import Any

import torch
import torch.fx
from torch import nn

from syncbn import _torch_private
from syncbn.block_tracer import Untraceable
from syncbn.fused import FusedBlock, graph_attributes

__all__ = ["check_class"]

# Methods by which a class makes, copies or loads its objects in its own way.
_COPYING = {"__new__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__"}
_COPYING |= {"__reduce__", "__reduce_ex__"}


def check_class(block: nn.Module, cls: type[nn.Module]) -> None:
    """Raise Untraceable where the block's class says that no graph can take its code's place."""
    if not isinstance(cls.forward, types.FunctionType) or "forward" in vars(block):
        raise Untraceable(f"{cls.__name__} has no ordinary method forward")
    reserved = {*dir(torch.fx.GraphModule)} - {*dir(nn.Module)}
    attributes = set() if isinstance(block, FusedBlock) else {*vars(block)}
    taken = reserved & {*dir(cls), *_torch_private.children(block)}
    taken |= graph_attributes().keys() & attributes
    taken |= {n for n in _COPYING if getattr(cls, n, None) is not getattr(nn.Module, n, None)}
    if taken:
        names = ", ".join(sorted(taken))
        raise Untraceable(f"{cls.__name__} has {names} of its own, as a GraphModule has")
    for parameter in list(inspect.signature(cls.forward).parameters.values())[1:]:
        is_plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if not is_plain or parameter.default is not parameter.empty:
            raise Untraceable(f"{cls.__name__}.forward has an optional argument {parameter.name!r}")
    if any("__init_subclass__" in vars(base) for base in _own_classes(cls)):
        raise Untraceable(f"{cls.__name__} wants to know of the classes that derive from it")
    if "type" in _names_in_code(cls):  # isinstance() sees to it itself
        raise Untraceable(f"the code of {cls.__name__} asks of what type a value is")


def _own_classes(cls: type[nn.Module]) -> tuple[type, ...]:
    return cls.__mro__[: cls.__mro__.index(nn.Module)]


def _names_in_code(cls: type[nn.Module]) -> set[str]:
    """Return the names that forward uses, and the methods and functions of others that it calls."""
    names: set[str] = set()
    own = [vars(base) for base in _own_classes(cls)]
    functions: list[Any] = [cls.forward]
    for function in functions:  # grows by what each calls
        codes = [function.__code__]
        for code in codes:  # grows by the functions within
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            names |= {*code.co_names}
        used = [name for code in codes for name in code.co_names]
        called = [of.get(name) for of in (function.__globals__, *own) for name in used]
        called += [_contents_of(cell) for cell in function.__closure__ or ()]
        for other in called:
            is_new = isinstance(other, types.FunctionType) and other not in functions
            if is_new and not (other.__module__ or "").startswith("torch."):
                functions.append(other)
    return names


def _contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
