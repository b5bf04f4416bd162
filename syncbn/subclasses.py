"""Synchronized classes of batch normalization classes: whose instances are still theirs.

A class is derived from one of torch's or a user's, and from :class:`syncbn.SyncBatchNorm`, whose
forward is the next that a ``super().forward`` of the user's class finds.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, TypeGuard

import torch.fx
from torch import nn

# From their own module: a program may have bound the names of torch.nn to something else.
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d

from syncbn import _torch_private
from syncbn._torch_private import BatchNormBase
from syncbn.modules import (
    PlainSyncBatchNorm,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    record_call,
)
from syncbn.reverted import BatchNorm

__all__ = ["derive", "is_derived", "synchronized"]

_OF_PLAIN: dict[type[nn.Module], type[SyncBatchNorm]] = {
    BatchNormBase: SyncBatchNorm,
    BatchNorm: SyncBatchNorm,
    BatchNorm1d: SyncBatchNorm1d,
    BatchNorm2d: SyncBatchNorm2d,
    BatchNorm3d: SyncBatchNorm3d,
}
_DIMS = {
    getattr(cls, _torch_private.INPUT_CHECK): ours._syncbn_dims for cls, ours in _OF_PLAIN.items()
}


class _Derived(nn.Module):
    """What generated classes have in common: a pickle makes the class again."""

    def __init_subclass__(cls) -> None:
        """Tell no base class: one that keeps a list of its subclasses expects a program's."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls: Any = type(self)
        return _new, (cls._syncbn_original, *cls.__bases__[1:]), self.__dict__


def _new(*classes: type[nn.Module]) -> nn.Module:
    cls = derive(*classes)
    return cls.__new__(cls)


_made: dict[tuple[type[nn.Module], ...], type[SyncBatchNorm]] = {}


def derive(original: type[nn.Module], *bases: type[nn.Module]) -> type[SyncBatchNorm]:
    """Return the synchronized class of ``original`` that has these bases: always the same."""
    key = (original, *bases)
    if key not in _made:
        input_check = getattr(original, _torch_private.INPUT_CHECK)
        names = {
            "__module__": original.__module__,
            "__doc__": f"{original.__name__} with the statistics of the whole batch.",
            "_syncbn_original": original,
            "_syncbn_dims": _DIMS.get(input_check),
            _torch_private.INPUT_CHECK: input_check,
        }
        if not _is_librarys(_owner(bases[0], "forward")):
            names["forward"] = _recorded(original)
        name = "Sync" + original.__name__.removeprefix("Sync")
        derived: Any = types.new_class(
            name, (_Derived, *bases), exec_body=lambda body: body.update(names)
        )
        _made[key] = derived
    return _made[key]


def _owner(cls: type, name: str) -> type:
    """Return the class that defines what instances of ``cls`` have under the name."""
    return next(base for base in cls.__mro__ if name in vars(base))


def _recorded(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return the class's forward, as one node in symbolic tracing."""

    @functools.wraps(cls.forward)
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.fx.Proxy) for value in (*args, *kwargs.values())):
            recorded = record_call(layer, forward, *args, **kwargs)
            if recorded is not None:
                return recorded
        return cls.forward(layer, *args, **kwargs)

    return forward


def synchronized(layer: nn.Module) -> type[SyncBatchNorm] | None:
    """Return the synchronized class of a batch normalization layer's; None where there is none.

    There is none of a class whose code is not seen to leave normalization to its base class.
    """
    cls = type(layer)
    has_own_activation = any(hasattr(layer, name) for name in _FOLLOWING)
    if cls is BatchNorm or (cls in _OF_PLAIN and not has_own_activation):
        return _OF_PLAIN[cls]
    own = [base for base in cls.__mro__ if not _is_librarys(base)]
    torchs = next(base for base in cls.__mro__ if base in _OF_PLAIN)
    names = {name for base in own for name in vars(base)}
    if names & _RESERVED or not all(_cooperates(cls, own, name) for name in names & _CALLED):
        return None
    is_plain = "forward" in names or has_own_activation
    users = () if cls in _OF_PLAIN else (cls,)
    plain = (PlainSyncBatchNorm,) if is_plain else ()
    return derive(cls, *users, *plain, _OF_PLAIN[torchs])


def is_derived(cls: type) -> bool:
    """Whether the class has been made here."""
    return issubclass(cls, _Derived)


_FOLLOWING = ("activation", "negative_slope")
# What runs in a call of a layer.
_CALLED = {"forward", "__call__"}
# What a layer of ours needs to be its own.
_RESERVED = {name for name in vars(SyncBatchNorm) if not hasattr(nn.Module, name)}
_RESERVED |= {"__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"}
_RESERVED |= {"__getstate__", "__setstate__"}
_RESERVED -= {"reset_parameters", *_FOLLOWING}

# Names in code that computes statistics, or normalizes by them, itself.
_NORMALIZING = {
    "mean",
    "rsqrt",
    "running_mean",
    "running_var",
    "std",
    "std_mean",
    "var",
    "var_mean",
}


# FSDP2 gives the modules that it shards a class of its own, which changes nothing of forward.
_LIBRARIES = ("torch.nn.modules.", "torch.distributed.fsdp", "syncbn.", "builtins", "typing")


def _is_librarys(cls: type) -> bool:
    return cls.__module__.startswith(_LIBRARIES)


def _cooperates(cls: type[nn.Module], own: list[type], name: str) -> bool:
    """Whether a method, with those that it calls, leaves normalization to ``super().forward``."""
    seen = {name}
    names = [name]
    calls_base = False
    for name in names:  # grows
        for base in own:
            if name not in vars(base):
                continue
            nodes = _nodes(vars(base)[name])
            if nodes is None:
                return False
            for node in nodes:
                used = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
                if used in _NORMALIZING or "norm" in used.lower():
                    return False
                if not isinstance(node, ast.Attribute):
                    continue
                if node.attr in _CALLED:
                    if not _is_super(node.value):
                        return False
                    calls_base = True
                elif node.attr not in seen:
                    seen.add(node.attr)
                    names.append(node.attr)
    return calls_base


def _nodes(member: object) -> list[ast.AST] | None:
    """Return the syntax of a method's body, nothing of data; None if code cannot be seen.

    Nor can it where it hands the layer itself to other code.
    """
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif not callable(member):
        return []
    if not inspect.isfunction(member) or hasattr(member, "__wrapped__"):
        return None
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(member))).body
    except (OSError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    nodes = [node for statement in definition.body for node in ast.walk(statement)]
    in_super = [argument for node in nodes if _is_super(node) for argument in node.args]
    nodes = [node for node in nodes if node not in in_super]
    layer = member.__code__.co_varnames[:1]
    own = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in layer and node not in own:
            return None
    return nodes


def _is_super(node: ast.AST) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )
