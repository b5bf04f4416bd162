"""The graph of a block's code, as torch.fx traces it, or why none can take its place."""

import collections
import copy
import inspect
import random
import sys
import types
import warnings
from typing import Any

import torch
import torch.fx
from torch import nn

from syncbn import _compat
from syncbn.fusion.graph_module import FusedBlock, class_of_block, graph_attributes
from syncbn.fusion.tracer import BlockTracer, OnlyRecorded, Untraceable

__all__ = ["called_modules", "check_class", "is_sequential", "trace"]


# Methods by which a class makes, copies or loads its objects in its own way.
_COPYING = {"__new__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__"}
_COPYING |= {"__reduce__", "__reduce_ex__"}


def check_class(block: nn.Module, cls: type[nn.Module]) -> None:
    """Raise Untraceable where the block's class says that no graph can take its code's place."""
    if not isinstance(cls.forward, types.FunctionType) or "forward" in vars(block):
        raise Untraceable(f"{cls.__name__} has no ordinary method forward")
    reserved = {*dir(torch.fx.GraphModule)} - {*dir(nn.Module)}
    attributes = set() if isinstance(block, FusedBlock) else {*vars(block)}
    taken = reserved & {*dir(cls), *_compat.children(block)}
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


def is_sequential(module: nn.Module) -> bool:
    """Whether the module runs its children one after the other and does nothing else."""
    runs_children = type(module).forward is nn.Sequential.forward
    return runs_children and _compat.does_as_its_class(module)


def trace(block: nn.Module, opened: set[nn.Module]) -> torch.fx.Graph:
    """Return the graph of a block's code, in which its children are calls, but those ``opened``.

    Raises:
        Untraceable: There is none, or it would do something else for other arguments, in the other
            mode, or the second time.
    """
    cls = class_of_block(block)
    check_class(block, cls)
    training, evaluation = _graphs_of_modes(block, opened)
    if training.python_code("self").src != evaluation.python_code("self").src:
        raise Untraceable(f"the code of {cls.__name__} differs between training and evaluation")
    for node in training.nodes:
        node.type = None  # annotations, which the generated code would have to import
    return training


def called_modules(block: nn.Module) -> set[nn.Module]:
    """Return the modules that a block's code calls, each as a whole.

    Raises:
        Untraceable: They depend on more than the mode.
    """
    return {
        block.get_submodule(str(node.target))
        for graph in _graphs_of_modes(block, opened=set())
        for node in graph.nodes
        if node.op == "call_module"
    }


def _graphs_of_modes(block: nn.Module, opened: set[nn.Module]) -> list[torch.fx.Graph]:
    """Return the graph in training, and that in evaluation without gradients."""
    # The code runs on a copy, and on the block's own children: what it changes in them is undone.
    root = nn.Module.__new__(class_of_block(block))
    vars(root).update(vars(block))
    name = type(root).__name__
    states = [_State(module) for module in (root, *block.modules()) if module is not block]
    generators = _generator_states()
    graphs = []
    try:
        for mode in (True, False):
            for module in root.modules():
                module.training = mode
            with warnings.catch_warnings(), torch.set_grad_enabled(mode), OnlyRecorded():
                warnings.simplefilter("ignore")
                graphs.append(BlockTracer(opened).trace(root))
    except Untraceable:
        raise
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise Untraceable(f"torch.fx cannot trace {name}: {words}") from None
    finally:
        changed = [state for state in states if state.restore()]
        drew = _generator_states() != generators
        _set_generator_states(generators)
    if changed:
        raise Untraceable(f"the code of {name} sets attributes")
    if drew:
        raise Untraceable(f"the code of {name} draws random numbers that its graph would keep")
    return graphs


class _State:
    """The attributes of a module, and what is in those that are containers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.contents = {
            name: copy.copy(value)
            for name, value in self.attributes.items()
            if isinstance(value, (dict, list, set, collections.deque))
        }

    def restore(self) -> bool:
        """Put back what has changed but for the mode, and return whether anything had."""
        now, mode = vars(self.module), self.attributes["training"]
        now["training"] = mode
        changed = _identities(now) != _identities(self.attributes)
        if changed:
            now.clear()
            now.update(self.attributes)
        for name, value in self.contents.items():
            container: Any = now[name]
            if _identities(container) != _identities(value):
                changed = True
                container.clear()
                is_set = isinstance(value, (dict, set))
                (container.update if is_set else container.extend)(value)
        return changed


def _identities(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]


def _generator_states() -> tuple[Any, ...]:
    """Return the states of the generators of random numbers that programs share."""
    states: tuple[Any, ...] = (torch.get_rng_state().tolist(), random.getstate())
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states += (kind, keys.tolist(), *rest)
    return states


def _set_generator_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(torch.tensor(states[0], dtype=torch.uint8, device="cpu"))
    random.setstate(states[1])
    if len(states) > 2:
        sys.modules["numpy"].random.set_state(states[2:])
