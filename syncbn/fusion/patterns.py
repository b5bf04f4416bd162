"""Matches in a module's graph: a layer and an activation, with or without an addition between."""

import operator
from collections.abc import Container, Iterable
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


class Match(NamedTuple):
    """The nodes of a match in the order of the graph, from the layer to the activation."""

    nodes: list[Node]
    addition: Node | None
    activation: tuple[str, float]  # and its slope


class _NotFused(Exception):
    """Why there is no match."""


def find(
    module: nn.Module, graph: torch.fx.Graph, layers: Container[nn.Module]
) -> dict[nn.Module, Match | str]:
    """Return the layers that the graph calls, each with its match or the reason for none."""
    found: dict[nn.Module, Match | str] = {}
    taken: set[Node] = set()
    # If both addends are layers, prefer the one called in the module's own code, so that the calls
    # of Sequentials stay; among those, the later one, so that no node has to be moved.
    nodes = sorted(reversed(graph.nodes), key=lambda node: "." in str(node.target))
    for node in nodes:
        layer = _called(module, node)
        if layer is None or layer not in layers:
            continue
        if layer in found:
            found[layer] = "is called at several positions"
            continue
        try:
            found[layer] = match = _match(module, node, taken)
            taken.update(match.nodes)
        except _NotFused as reason:
            found[layer] = str(reason)
    return found


def fuse(module: nn.Module, graph: torch.fx.Graph, matches: Iterable[Match]) -> None:
    """Replace each match by one call."""
    for match in matches:
        layer, last = match.nodes[0], match.nodes[-1]
        # At the addition both addends are known, and the layer's output has no other user.
        with graph.inserting_before(match.addition or layer):
            norm = graph.get_attr(str(layer.target))
            activation: Any = match.activation
            if last.op == "call_module":
                activation = graph.get_attr(str(last.target))
            function: Any = graph_module.normalize_activate
            operands: tuple[Any, ...] = (layer.args[0],)
            if match.addition is not None:
                function = graph_module.normalize_add_activate
                operands += _other_addend(module, match.addition, match.nodes)
            call = graph.call_function(function, (norm, *operands, activation))
        call.meta["is_wrapped"] = True  # the next tracer records the call
        last.replace_all_uses_with(call)
        for node in reversed(match.nodes):
            graph.erase_node(node)
    graph.lint()


def _called(root: nn.Module, node: Node) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def kind_of(module: nn.Module | None) -> str:
    """Return the text by which a reason names a module: its class, and whether it has hooks."""
    has_hooks = module is not None and _compat.has_hooks(module)
    return f"{type(module).__name__}{' with hooks' * has_hooks}"


def _match(root: nn.Module, layer: Node, taken: set[Node]) -> Match:
    """Return the match that begins with the call of a layer, or raise _NotFused.

    Nodes that are ``taken`` belong to other matches.
    """
    if len(layer.args) != 1 or layer.kwargs:
        raise _NotFused("is given other arguments than one input")
    nodes, addition = [layer], None
    while True:
        node = _only_user(nodes[-1])
        if node in taken:
            raise _NotFused("is added to another layer, which is fused")
        if addition is None and _is_addition(node):
            _check_moves(root, layer, node, nodes)
            addition = node
        elif not _calls_plain(root, node, {nn.Identity}):
            break
        nodes.append(node)
    activation = _activation_of(root, node)
    if activation is None:
        raise _NotFused(f"is followed by {_describe(root, node)}, which cannot be fused")
    # The fused backward pass needs the output, which torch lets later code change in place.
    if addition is not None and activation[0] == "leaky_relu" and not _is_in_place(root, node):
        raise _NotFused("is followed by an addition and a leaky ReLU that is not in place")
    if addition is not None and activation[0] not in epilogue.FROM_OUTPUT:
        _check_stays(root, _other_addend(root, addition, nodes)[0], addition)
    return Match([*nodes, node], addition, activation)


def _only_user(node: Node) -> Node:
    users = [user for user in node.users for value in _values(user) if value is node]
    if len(users) != 1:
        raise _NotFused(f"its output is used {len(users)} times" if users else "is not used")
    if users[0].op == "output":
        raise _NotFused("is followed by no activation")
    return users[0]


def _values(node: Node) -> list[Any]:
    """Return the arguments of a node and the contents of containers in them, with repetitions."""
    values: list[Any] = [*node.args, *node.kwargs.values()]
    for value in values:  # grows by the contents of containers
        if isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, slice):
            values += [value.start, value.stop, value.step]
    return values


def _calls_plain(root: nn.Module, node: Node, classes: set[type[nn.Module]]) -> bool:
    """Whether the node calls a module of one of the classes that does nothing else."""
    module = _called(root, node)
    return module is not None and type(module) in classes and _compat.does_as_its_class(module)


_ADDITIONS = {operator.add, operator.iadd, torch.add}


def _is_addition(node: Node) -> bool:
    is_method = node.op == "call_method" and node.target in ("add", "add_")
    is_sum = is_method or (node.op == "call_function" and node.target in _ADDITIONS)
    are_values = len(node.args) == 2 and all(isinstance(value, Node) for value in node.args)
    return is_sum and are_values and not node.kwargs


def _is_in_place(root: nn.Module, node: Node) -> bool:
    """Whether the node writes to its first argument."""
    if node.op == "call_module":
        return getattr(_called(root, node), "inplace", False) is True
    is_true = any(value is True for value in (*node.args, node.kwargs.get("inplace")))
    if is_true or "out" in node.kwargs:
        return True  # an argument that is True may be the inplace of F.relu or another function
    name = str(getattr(node.target, "__name__", node.target))
    is_named = name.endswith("_") and not name.endswith("__")
    return is_named or node.target in IN_PLACE_OPERATORS.values()


def _other_addend(root: nn.Module, addition: Node, nodes: list[Node]) -> tuple[Any, str]:
    """Return the addend that is not the layer's, and how the code adds it."""
    first, second = addition.args
    if first not in nodes:
        return first, "addend + layer"
    return second, "layer += addend" if _is_in_place(root, addition) else "layer + addend"


def _check_moves(root: nn.Module, layer: Node, addition: Node, nodes: list[Node]) -> None:
    """Raise _NotFused if the layer may not be computed as late as the addition."""
    if _is_in_place(root, addition) and addition.args[0] not in nodes:
        raise _NotFused("is added in place to another value")
    between = [node for node in layer.graph.nodes if layer < node < addition and node not in nodes]
    reads = [node for node in between if _has_buffer_of(root, layer, node)]
    if reads:
        raise _NotFused(f"its buffers are used before the addition, in {_describe(root, reads[0])}")
    between = [node for node in between if node.op != "get_attr"]
    # Nodes in between may write to the layer's input, unless only the layer has it.
    source: Any = layer.args[0]
    is_only_user = isinstance(source, Node) and len(source.users) == 1
    if between and not (is_only_user and _calls_plain(root, source, _MAKE_THEIR_OUTPUT)):
        raise _NotFused(
            f"its input may change before the addition, in {_describe(root, between[0])}"
        )


def _has_buffer_of(root: nn.Module, layer: Node, node: Node) -> bool:
    """Whether a node reads a buffer of the layer, or calls a module that has one."""
    if node.op == "get_attr":
        return str(node.target).startswith(f"{layer.target}.")
    module, norm = _called(root, node), root.get_submodule(str(layer.target))
    buffers = {*map(id, norm.buffers())}
    return module is not None and any(id(buffer) in buffers for buffer in module.buffers())


# Modules whose output is a new tensor and no view.
_MAKE_THEIR_OUTPUT: set[type[nn.Module]] = {
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
}


def _check_stays(root: nn.Module, addend: Any, addition: Node) -> None:
    """Raise _NotFused if a later node writes to the addend, which the backward pass needs."""
    for user in addend.users:
        if user is not addition and _is_in_place(root, user) and user > addition:
            where = _describe(root, user)
            raise _NotFused(f"the other addend, which backward needs, changes later, in {where}")


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


def _activation_of(root: nn.Module, node: Node) -> tuple[str, float] | None:
    """Return the activation and slope of a node that applies one to its first argument."""
    module = _called(root, node)
    if module is not None:
        has_one_argument = len(node.args) == 1 and not node.kwargs
        return epilogue.of_module(module) if has_one_argument else None
    activation = _FUNCTIONS.get(node.target) if node.args else None
    slope: Any = 0.01
    if activation == "leaky_relu":
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
    return None if activation is None or not epilogue.is_slope(slope) else (activation, slope)


def _describe(root: nn.Module, node: Node) -> str:
    module = _called(root, node)
    if module is not None:
        return kind_of(module)
    return getattr(node.target, "__name__", str(node.target))
