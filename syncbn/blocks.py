"""The graph of a block's code, as torch.fx traces it, or why none can take its place."""

import collections
import copy
import random
import sys
import warnings
from typing import Any

import torch
import torch.fx
from torch import nn

from syncbn import _torch_private
from syncbn.block_class import check_class
from syncbn.block_tracer import BlockTracer, OnlyRecorded, Untraceable
from syncbn.fused import class_of_block

__all__ = ["called_modules", "is_sequential", "trace"]


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
