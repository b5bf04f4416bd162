"""The graph of a module's code, as torch.fx traces it, or why no graph can replace the code."""

import collections
import contextlib
import copy
import inspect
import pickle
import random
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx
from torch import nn

from syncbn import _compat
from syncbn.fusion.graph_module import original_class
from syncbn.fusion.tracer import ModuleTracer, OnlyRecorded, TraceError

# Packages whose functions may run while a module is traced.
_LIBRARIES = {"syncbn", "torch", *sys.stdlib_module_names}


def is_sequential(module: nn.Module) -> bool:
    """Whether the module runs its children one after the other and does nothing else."""
    return type(module).forward is nn.Sequential.forward and _compat.does_as_its_class(module)


def trace(module: nn.Module, inlined: set[nn.Module]) -> torch.fx.Graph:
    """Return the graph of a module's code, in which its children are calls, but the ``inlined``.

    Raises:
        TraceError: There is none, or it would do something else for other arguments, in the other
            mode, or the second time.
    """
    cls = original_class(module)
    _check_forward(module, cls)
    training, evaluation = _graphs_of_modes(module, inlined)
    if training.python_code("self").src != evaluation.python_code("self").src:
        raise TraceError(f"the code of {cls.__name__} differs between training and evaluation")
    for node in training.nodes:
        node.type = None  # annotations, which the generated code would have to import
    return training


def called_modules(module: nn.Module) -> set[nn.Module]:
    """Return the modules that a module's code calls, each as a whole.

    Raises:
        TraceError: They depend on more than the mode.
    """
    return {
        module.get_submodule(str(node.target))
        for graph in _graphs_of_modes(module, inlined=set())
        for node in graph.nodes
        if node.op == "call_module"
    }


def _check_forward(module: nn.Module, cls: type[nn.Module]) -> None:
    """Raise TraceError unless ``forward`` is a method with plain arguments, of code in Python."""
    is_generated = issubclass(cls, torch.fx.GraphModule)
    is_method = isinstance(cls.forward, types.FunctionType) and "forward" not in vars(module)
    if is_generated or not is_method:
        raise TraceError(f"{cls.__name__} has no ordinary method forward")
    for parameter in list(inspect.signature(cls.forward).parameters.values())[1:]:
        is_plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if not is_plain or parameter.default is not parameter.empty:
            raise TraceError(f"{cls.__name__}.forward has an optional argument {parameter.name!r}")


def _graphs_of_modes(module: nn.Module, inlined: set[nn.Module]) -> list[torch.fx.Graph]:
    """Return the graph in training, and the graph in evaluation without gradients."""
    # The code runs on a copy of the module, which has the module's own children.
    root = nn.Module.__new__(original_class(module))
    vars(root).update(vars(module))
    name = type(root).__name__
    modes = {m: m.training for m in root.modules()}
    attributes = _contents(modes)
    generators = _generators()
    graphs = []
    try:
        for mode in (True, False):
            for m in modes:
                m.training = mode
            with warnings.catch_warnings(), torch.set_grad_enabled(mode), OnlyRecorded():
                warnings.simplefilter("ignore")
                with _no_calls_of_type():
                    graphs.append(ModuleTracer(inlined).trace(root))
    except TraceError:
        raise
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise TraceError(f"torch.fx cannot trace {name}: {message}") from None
    finally:
        for m, mode in modes.items():
            m.training = mode
        has_set = _restore(attributes)
        has_drawn = False
        for (set_state, state, before), (_, _, now) in zip(generators, _generators(), strict=False):
            has_drawn |= now != before
            set_state(state)
    if has_set:
        raise TraceError(f"the code of {name} sets attributes")
    if has_drawn:
        raise TraceError(f"the code of {name} draws random numbers that its graph would keep")
    return graphs


@contextlib.contextmanager
def _no_calls_of_type() -> Iterator[None]:
    """Raise TraceError if a function of the user's uses type(), which no proxy can answer."""
    users: list[str] = []

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and "type" in frame.f_code.co_names:
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package not in _LIBRARIES:
                users.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
    if users:
        raise TraceError(f"its code asks for the type of a value, in {users[0]}")


def _contents(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """Return the containers in the attributes of modules, the modules' own first, with copies."""
    own = [vars(module) for module in modules]
    inner = [value for attributes in own for value in attributes.values()]
    kinds = (dict, list, set, collections.deque)
    return [(value, copy.copy(value)) for value in (*own, *inner) if isinstance(value, kinds)]


def _restore(contents: list[tuple[Any, Any]]) -> bool:
    """Give containers their contents back, and return whether one of them had changed."""
    changed = [pair for pair in contents if _identities(pair[0]) != _identities(pair[1])]
    for container, before in changed:
        container.clear()
        is_set = isinstance(before, (dict, set))
        (container.update if is_set else container.extend)(before)
    return bool(changed)


def _identities(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]


def _generators() -> list[tuple[Any, Any, Any]]:
    """Return for each global random number generator its setter, its state, and that as bytes."""
    state = torch.get_rng_state()
    generators = [
        (torch.set_rng_state, state, bytes(state.tolist())),
        (random.setstate, random.getstate(), pickle.dumps(random.getstate())),
    ]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        generators.append((numpy.set_state, numpy.get_state(), pickle.dumps(numpy.get_state())))
    return generators
