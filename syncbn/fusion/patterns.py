"""Places in a block's graph where an activation follows a layer, directly or behind an addition."""

import operator
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from syncbn import _compat
from syncbn.fusion import graph_module
from syncbn.fusion.tracer import IN_PLACE_OPERATORS
from syncbn.ops import epilogue

__all__ = ["Place", "find", "fuse", "kind_of"]


class Place(NamedTuple):
    """The nodes of a place in the order of the graph, and what they compute."""

    nodes: list[Node]
    addition: Node | None
    what: tuple[str, float]  # activation and slope


class _NotFused(Exception):
    """Why a place cannot be fused."""


def find(
    block: nn.Module, graph: torch.fx.Graph, layers: Container[nn.Module]
) -> dict[nn.Module, Place | str]:
    """Return those of the layers that the graph calls, with their place or why they have none."""
    found: dict[nn.Module, Place | str] = {}
    taken: set[Node] = set()
    # Of two summands that of the block's own code, so that its Sequentials stay as they are; then
    # the one that is computed later, which moves past nothing.
    nodes = sorted(reversed(graph.nodes), key=lambda node: "." in str(node.target))
    for node in nodes:
        layer = _called(block, node)
        if layer is None or layer not in layers:
            continue
        if layer in found:
            found[layer] = "is called at several places"
            continue
        try:
            place = _place(block, node, taken)
        except _NotFused as reason:
            found[layer] = str(reason)
            continue
        taken.update(place.nodes)
        found[layer] = place
    return found


def fuse(block: nn.Module, graph: torch.fx.Graph, layers: Container[nn.Module]) -> None:
    """Replace each place of one of the layers by one call."""
    for place in find(block, graph, layers).values():
        if isinstance(place, str):
            continue
        layer, last = place.nodes[0], place.nodes[-1]
        # Where the summand is known; what follows is computed from nothing else.
        with graph.inserting_before(place.addition or layer):
            module = graph.get_attr(str(layer.target))
            activation: Any = place.what
            if last.op == "call_module":
                activation = graph.get_attr(str(last.target))
            function: Any = graph_module.normalize_activate
            operands: tuple[Any, ...] = (layer.args[0],)
            if place.addition is not None:
                function = graph_module.normalize_add_activate
                operands += _other_summand(block, place.addition, place.nodes)
            call = graph.call_function(function, (module, *operands, activation))
        call.meta["is_wrapped"] = True  # the generated code says so to the next tracer
        last.replace_all_uses_with(call)
        for node in reversed(place.nodes):
            graph.erase_node(node)
    graph.lint()


def _called(block: nn.Module, node: Node) -> nn.Module | None:
    return block.get_submodule(str(node.target)) if node.op == "call_module" else None


def kind_of(module: nn.Module | None) -> str:
    """Return the module's class, and whether it has hooks, for a reason."""
    has_hooks = module is not None and _compat.has_hooks(module)
    return f"{type(module).__name__}{' with hooks' * has_hooks}"


def _place(block: nn.Module, layer: Node, taken: set[Node]) -> Place:
    """Return the place that begins with the call of a layer, or raise _NotFused.

    Nodes that are ``taken`` belong to other places.
    """
    if len(layer.args) != 1 or layer.kwargs:
        raise _NotFused("is given other arguments than one input")
    nodes, addition = [layer], None
    while True:
        node = _only_user(nodes[-1])
        if node in taken:
            raise _NotFused("is added to another layer, which is fused")
        if addition is None and _is_addition(node):
            _check_moves(block, layer, node, nodes)
            addition = node
        elif not _is_identity(block, node):
            break
        nodes.append(node)
    what = _activation_of(block, node)
    if what is None:
        raise _NotFused(f"is followed by {_describe(block, node)}, which cannot be fused")
    if addition is not None and what[0] == "silu":
        _check_stays(block, _other_summand(block, addition, nodes)[0], addition)
    return Place([*nodes, node], addition, what)


def _only_user(node: Node) -> Node:
    users = [user for user in node.users for value in _values(user) if value is node]
    if len(users) != 1:
        raise _NotFused(f"its output is used {len(users)} times" if users else "is not used")
    if users[0].op == "output":
        raise _NotFused("is followed by no activation")
    return users[0]


def _values(node: Node) -> Iterator[Any]:
    """Yield the values that a node is computed from, as often as it takes them."""
    values: list[Any] = [*node.args, *node.kwargs.values()]
    for value in values:  # grows by what containers hold
        if isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, slice):
            values += [value.start, value.stop, value.step]
    yield from values


def _is_identity(block: nn.Module, node: Node) -> bool:
    module = _called(block, node)
    return type(module) is nn.Identity and _compat.does_as_its_class(module)


_ADDITIONS = {operator.add, operator.iadd, torch.add}


def _is_addition(node: Node) -> bool:
    is_method = node.op == "call_method" and node.target in ("add", "add_")
    is_sum = is_method or (node.op == "call_function" and node.target in _ADDITIONS)
    are_values = len(node.args) == 2 and all(isinstance(value, Node) for value in node.args)
    return is_sum and are_values and not node.kwargs


def _is_in_place(block: nn.Module, node: Node) -> bool:
    """Whether the node writes to its first argument."""
    if node.op == "call_module":
        return getattr(_called(block, node), "inplace", False) is True
    name = str(getattr(node.target, "__name__", node.target))
    is_named = name.endswith("_") and not name.endswith("__")
    return is_named or node.target in IN_PLACE_OPERATORS.values()


def _other_summand(block: nn.Module, addition: Node, nodes: list[Node]) -> tuple[Any, str]:
    """Return the summand that is not of the place, and how the code adds it."""
    first, second = addition.args
    if first not in nodes:
        return first, "summand + layer"
    return second, "layer += summand" if _is_in_place(block, addition) else "layer + summand"


def _check_moves(block: nn.Module, layer: Node, addition: Node, nodes: list[Node]) -> None:
    """Raise _NotFused where the layer may not be computed as late as the addition."""
    if _is_in_place(block, addition) and addition.args[0] not in nodes:
        raise _NotFused("is added in place to another value")
    between, node = [], layer.next
    while node is not addition:
        between += [] if node in nodes else [node]
        node = node.next
    reads = [node for node in between if _has_buffer_of(block, layer, node)]
    if reads:
        raise _NotFused(
            f"its buffers are used before the addition, in {_describe(block, reads[0])}"
        )
    between = [node for node in between if node.op != "get_attr"]
    # What is computed in between may write to the layer's input, unless that is the layer's alone.
    source = layer.args[0]
    is_alone = isinstance(source, Node) and len(source.users) == 1
    if between and not (is_alone and _makes_its_output(block, source)):
        raise _NotFused(
            f"its input may change before the addition, in {_describe(block, between[0])}"
        )


def _has_buffer_of(block: nn.Module, layer: Node, node: Node) -> bool:
    """Whether a node reads a buffer of the layer, or calls a module that has one of them."""
    if node.op == "get_attr":
        return str(node.target).startswith(f"{layer.target}.")
    module, norm = _called(block, node), _called(block, layer)
    assert norm is not None
    buffers = {*map(id, norm.buffers())}
    return module is not None and any(id(buffer) in buffers for buffer in module.buffers())


def _makes_its_output(block: nn.Module, node: Any) -> bool:
    """Whether the node's value is a tensor of its own, that nothing else has seen."""
    module = _called(block, node)
    is_known = type(module) in _MAKE_THEIR_OUTPUT
    return module is not None and is_known and _compat.does_as_its_class(module)


_MAKE_THEIR_OUTPUT = {
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
}


def _check_stays(block: nn.Module, summand: Any, addition: Node) -> None:
    """Raise _NotFused where a value is written to behind the addition: backward would miss it."""
    for user in summand.users:
        if user is not addition and _is_in_place(block, user) and user > addition:
            where = _describe(block, user)
            raise _NotFused(f"the other summand, which backward needs, changes later, in {where}")


_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    "relu": "relu",
    "relu_": "relu",
    F.leaky_relu: "leaky_relu",
    F.leaky_relu_: "leaky_relu",
    F.silu: "silu",
}


def _activation_of(block: nn.Module, node: Node) -> tuple[str, float] | None:
    """Return activation and slope of a node that applies one, to its first argument alone."""
    module = _called(block, node)
    if module is not None:
        alone = len(node.args) == 1 and not node.kwargs
        return epilogue.of_module(module) if alone else None
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    activation = _FUNCTIONS.get(node.target)
    slope: Any = 0.01
    if activation == "leaky_relu":
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
    is_known = activation is not None and epilogue.is_slope(slope)
    return (str(activation), slope) if is_known else None


def _describe(block: nn.Module, node: Node) -> str:
    module = _called(block, node)
    if module is not None:
        return kind_of(module)
    return getattr(node.target, "__name__", str(node.target))
