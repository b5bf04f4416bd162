"""The graph of a block's code, as torch.fx traces it, or why none can take its place."""

import copy
import inspect
import random
import types
import warnings
from typing import Any

import torch
import torch.fx
from torch import nn

from syncbn import _torch_private
from syncbn.block_tracer import BlockTracer, Untraceable
from syncbn.fused import FusedBlock, class_of_block, graph_attributes

__all__ = ["is_sequential", "trace"]


def is_sequential(module: nn.Module) -> bool:
    """Whether the module runs its children one after the other and does nothing else."""
    runs_children = type(module).forward is nn.Sequential.forward
    return runs_children and _torch_private.does_as_its_class(module)


def trace(block: nn.Module, opened: set[nn.Module]) -> torch.fx.Graph:
    """Return the graph of a block's code, in which its children are calls, but those ``opened``.

    Raises:
        Untraceable: There is none, or it would do something else for other arguments, in the other
            mode, or the second time.
    """
    cls = class_of_block(block)
    _check_class(block, cls)
    # What the code sets or changes is that of this one.
    root = _torch_private.with_class(block, cls)
    for name, value in vars(root).items():
        vars(root)[name] = copy.copy(value) if type(value) in (dict, list, set) else value
    before = {name: _contents(value) for name, value in vars(root).items()}
    training, evaluation = _graphs_of_modes(root, opened)
    if before != {name: _contents(value) for name, value in vars(root).items()}:
        raise Untraceable(f"the code of {cls.__name__} sets attributes or makes tensors")
    if training.python_code("self").src != evaluation.python_code("self").src:
        raise Untraceable(f"the code of {cls.__name__} differs between training and evaluation")
    for node in training.nodes:
        node.type = None  # annotations, which the generated code would have to import
    return training


def _contents(value: Any) -> Any:
    """Return what tells whether a container has changed; of others which object it is."""
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, (list, set)):
        return [id(item) for item in value]
    return id(value)


def _graphs_of_modes(root: nn.Module, opened: set[nn.Module]) -> list[torch.fx.Graph]:
    """Return the graph in training and in evaluation; modes and random numbers stay."""
    name = type(root).__name__
    modes = {module: module.training for module in root.modules()}
    states = torch.get_rng_state(), random.getstate()
    graphs = []
    try:
        for mode in (True, False):
            for module in modes:
                module.training = mode
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graphs.append(BlockTracer(opened).trace(root))
        if not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate():
            raise Untraceable(f"the code of {name} draws random numbers that its graph would keep")
    except Untraceable:
        raise
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise Untraceable(f"torch.fx cannot trace {name}: {words}") from None
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        for module, mode in modes.items():
            module.training = mode
    return graphs


# Methods by which a class makes, copies or loads its objects in its own way.
_COPYING = {"__new__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__"}
_COPYING |= {"__reduce__", "__reduce_ex__"}
# Functions that see torch.fx's stand-in for a tensor, and no tensor.
_ASKING = {"isinstance", "is_tensor", "type"}


def _check_class(block: nn.Module, cls: type[nn.Module]) -> None:
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
    asked = _ASKING & _names_in_code(cls)
    if asked:
        names = ", ".join(sorted(asked))
        raise Untraceable(f"the code of {cls.__name__} asks what its values are: {names}")


def _names_in_code(cls: type[nn.Module]) -> set[str]:
    """Return the names that forward uses, and the methods of its class that it calls."""
    names: set[str] = set()
    own_classes = cls.__mro__[: cls.__mro__.index(nn.Module)]
    methods = ["forward"]
    for method in methods:  # grows by what each calls
        for base in own_classes:
            code = getattr(inspect.unwrap(vars(base).get(method, None)), "__code__", None)
            codes = [] if code is None else [code]
            for code in codes:  # grows by the functions within
                codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
                names |= {*code.co_names}
                methods += [name for name in code.co_names if name not in methods]
    return names
