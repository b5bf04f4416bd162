"""fuse_activations(): activations and additions into the layers they follow; explain_fusion()."""

from typing import NamedTuple

import torch
from torch import nn

from syncbn import _compat
from syncbn._compat import BatchNormBase
from syncbn.fusion import capture, graph_module, patterns
from syncbn.fusion.tracer import Untraceable
from syncbn.modules import ModuleT, SyncBatchNorm, SyncBatchNormAct
from syncbn.ops import epilogue

__all__ = ["FusedLayer", "FusionReport", "LeftLayer", "explain_fusion", "fuse_activations"]


class FusedLayer(NamedTuple):
    """A layer that applies an activation, and whether it adds a residual before."""

    name: str
    activation: str
    residual: bool


class LeftLayer(NamedTuple):
    """A layer that applies none, and why."""

    name: str
    reason: str


class FusionReport(NamedTuple):
    """The batch normalization layers of a model, in its order; prints as a table."""

    fused: list[FusedLayer]
    left: list[LeftLayer]

    def __str__(self) -> str:
        rows = [("layer", "fused with", "or why not")]
        rows += [(f.name, f"{'+ ' * f.residual}{f.activation}", "") for f in self.fused]
        rows += [(left.name, "", left.reason) for left in self.left]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        total = len(self.fused) + len(self.left)
        layers = f"{len(self.fused)} of {total} batch normalization layers fused"
        return "\n".join([*lines, layers])


def fuse_activations(model: ModuleT) -> ModuleT:
    """Fuse activations and additions into the SyncBatchNorm layers of a model that they follow.

    Such a layer trains in as many passes over memory as without them. Fused are ReLU,
    LeakyReLU and SiLU right behind a layer, in an ``nn.Sequential``, in timm's ``BatchNormAct2d``
    (which conversion alone does) and, where ``torch.fx`` can trace it, in the code of a module; in
    code also behind the addition of another value of the same shape and dtype. Results,
    state_dict and parameters stay; :func:`explain_fusion` tells what is left and why;
    :func:`syncbn.revert_sync_batchnorm` takes all of it back.

    Convert first and compile after. In a Sequential an identity takes the activation's place: who
    takes a part of the Sequential finds the activation in the layer. A module whose code is fused
    becomes a ``torch.fx.GraphModule`` that is still of its own class: attributes and globals that
    its code reads, but for ``training`` and tensors, are those of this call from then on, and so
    are arguments that are None. Exchange modules, and change their code, before the call or after
    a revert. All ranks must fuse alike, because a layer that takes an addition runs where that
    stands.

    Args:
        model: The model, with converted layers; changed in place.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: The model or a part of it with layers in it has been compiled. Nothing has been
            changed then.

    Example:
        >>> from torch import nn
        >>> from syncbn import convert_sync_batchnorm, fuse_activations
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> fuse_activations(convert_sync_batchnorm(model))[1].activation
        'relu'
    """
    _compat.check_module(model)
    _check_not_compiled(model)
    plan = _Plan(model)
    # What may raise comes before the first change.
    graphs = [
        (block, graph_module.fused_class(graph_module.class_of_block(block)), graph)
        for block, graph in plan.blocks
        if not isinstance(block, graph_module.FusedBlock)
        or block.code != graph.python_code("self").src
    ]
    for neighbours in plan.neighbours:
        layer = neighbours.layer
        children = _compat.children(neighbours.parent)
        activation = children[neighbours.name]
        assert activation is not None
        children[neighbours.name] = graph_module.FusedActivation(layer, activation)
        layer.activation, layer.negative_slope = neighbours.what
    for block, cls, graph in graphs:
        graph_module.run_graph(block, cls, graph)
    return model


def explain_fusion(model: nn.Module) -> FusionReport:
    """Report what :func:`fuse_activations` fuses in a model or has fused; change nothing.

    Args:
        model: The model.

    Returns:
        The layers that are or would be ``fused``, and those that are ``left``, with the reason.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> from torch import nn
        >>> from syncbn import SyncBatchNorm, explain_fusion
        >>> print(explain_fusion(nn.Sequential(SyncBatchNorm(8), nn.ReLU(), SyncBatchNorm(8))))
        layer  fused with  or why not
        0      relu
        2                  is followed by nothing in its Sequential
        1 of 2 batch normalization layers fused
    """
    _compat.check_module(model)
    return _Plan(model).report()


def _check_not_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        compiled = _compat.compiled_original(module)
        is_compiled = compiled is not None or _compat.is_compiled(module)
        if is_compiled and any(isinstance(layer, SyncBatchNorm) for layer in module.modules()):
            what = f"the module {name!r}" if name else "the model"
            raise ValueError(
                f"{what} has been compiled, so that its old code would go on to run; fuse the "
                "model first and compile after that"
            )


class _Neighbours(NamedTuple):
    """A layer, and the place of the activation behind it in a Sequential."""

    layer: SyncBatchNorm
    parent: nn.Module
    name: str
    what: tuple[str, float]


class _Plan:
    """What can be fused in a model: neighbours, and the graphs of blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.neighbours: list[_Neighbours] = []
        self.blocks: list[tuple[nn.Module, torch.fx.Graph]] = []
        # Each layer with what it is fused with, or why it is not.
        self.layers: dict[str, tuple[str, bool] | str] = {}
        self._parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._called: dict[nn.Module, set[nn.Module] | str] = {}
        for parent in model.modules():
            for name, child in _compat.children(parent).items():
                if child is not None:
                    self._parents.setdefault(child, []).append((parent, name))
        in_blocks: dict[nn.Module, dict[nn.Module, str]] = {}
        for name, layer in model.named_modules():
            if not isinstance(layer, BatchNormBase):
                continue
            block = None
            found = self._by_itself(layer)
            if found is None:
                found = self._in_sequential(layer)
            if found is None:
                block, found = self._block_of(layer)
            self.layers[name] = found
            if block is not None:
                in_blocks.setdefault(block, {})[layer] = name
        for block, names in in_blocks.items():
            self._trace(block, names)

    def report(self) -> FusionReport:
        report = FusionReport([], [])
        for name, found in self.layers.items():
            if isinstance(found, str):
                report.left.append(LeftLayer(name, found))
            else:
                report.fused.append(FusedLayer(name, *found))
        return report

    def _by_itself(self, layer: nn.Module) -> tuple[str, bool] | str | None:
        """Return what is known from the layer alone."""
        if not isinstance(layer, SyncBatchNorm):
            return "is not converted"
        if layer._syncbn_takes_activation and layer.activation is not None:
            return layer.activation, False
        if isinstance(layer, SyncBatchNormAct):
            activation = layer.fused_activation()
            if activation is not None:
                return activation[0], False
            behind = layer.drop if type(layer.drop) is not nn.Identity else layer.act
            return f"has {patterns.kind_of(behind)} behind it, which cannot be fused"
        if type(layer).forward is not SyncBatchNorm.forward:
            return f"is a {type(layer).__name__}"
        if _compat.has_hooks(layer):
            return "has hooks"
        if not graph_module.is_bare(layer):
            return "has a forward of its own, or has been compiled"
        if len(self._parents.get(layer, ())) > 1:
            return "is registered at several places"
        return None

    def _in_sequential(self, layer: nn.Module) -> tuple[str, bool] | str | None:
        """Return what is known from the next layer of a Sequential; None if there is none."""
        if layer not in self._parents:
            return "is the model"
        ((parent, name),) = self._parents[layer]
        # Its hooks do no harm.
        if type(parent).forward is not nn.Sequential.forward or "forward" in vars(parent):
            return None
        siblings = [*_compat.children(parent).items()]
        position = [name for name, _ in siblings].index(name) + 1
        if position == len(siblings):
            return None
        name, sibling = siblings[position]
        what = None if sibling is None else epilogue.of_module(sibling)
        if what is None or sibling is None:
            return f"is followed by {patterns.kind_of(sibling)}, which cannot be fused"
        reason = self._why_in_parts(parent)
        if reason is not None:
            return reason
        assert isinstance(layer, SyncBatchNorm)
        self.neighbours.append(_Neighbours(layer, parent, name, what))
        return what[0], False

    def _why_in_parts(self, sequential: nn.Module) -> str | None:
        """Return why something else may run the parts of a Sequential; None if nothing does."""
        parts = {*sequential.modules()} - {sequential}
        above = [sequential]
        for module in above:  # grows up to the modules with code
            for parent, _ in self._parents.get(module, ()):
                if _is_container(parent):
                    above.append(parent)
                    continue
                name, called = type(parent).__name__, self._called_by(parent)
                if isinstance(called, str):
                    return f"may be run without its Sequential by the code of {name}: {called}"
                if parts & called:
                    return f"is run without its Sequential by the code of {name}"
        return None

    def _called_by(self, block: nn.Module) -> set[nn.Module] | str:
        """Return the modules that a block's code calls, or why that is not known."""
        if block not in self._called:
            try:
                self._called[block] = capture.called_modules(block)
            except Untraceable as reason:
                self._called[block] = str(reason)
        return self._called[block]

    def _block_of(self, layer: nn.Module) -> tuple[nn.Module | None, str]:
        """Return the module whose code may call the layer, or None and why there is none."""
        module = layer
        while module in self._parents:
            if len(self._parents[module]) > 1:
                return None, "is registered at several places"
            ((module, _),) = self._parents[module]
            if not _is_container(module):
                return module, "is not called by the code of its module"
        return None, "is followed by nothing in its Sequential"

    def _trace(self, block: nn.Module, names: dict[nn.Module, str]) -> None:
        """Find out what can be fused in a block with these layers."""
        opened = {m for m in block.modules() if m is not block and capture.is_sequential(m)}
        try:
            found = patterns.find(block, capture.trace(block, opened), names)
            # Those without a fused layer in them are called as before.
            of_fused = [
                layer for layer, place in found.items() if isinstance(place, patterns.Place)
            ]
            graph = capture.trace(block, opened & self._between(of_fused, block))
        except Untraceable as reason:
            self.layers.update(dict.fromkeys(names.values(), str(reason)))
            return
        in_graph = patterns.find(block, graph, names)
        for layer, place in found.items():
            if isinstance(place, patterns.Place):  # what is closed now may have been part of it
                place = in_graph[layer]
            self.layers[names[layer]] = _entry(place)
        if any(isinstance(place, patterns.Place) for place in in_graph.values()):
            patterns.fuse(block, graph, names)
            self.blocks.append((block, graph))

    def _between(self, layers: list[nn.Module], block: nn.Module) -> set[nn.Module]:
        """Return the modules between the layers and their block."""
        between: set[nn.Module] = set()
        for module in layers:
            while module is not block:
                between.add(module)
                ((module, _),) = self._parents[module]
        return between


def _entry(place: patterns.Place | str) -> tuple[str, bool] | str:
    return place if isinstance(place, str) else (place.what[0], place.addition is not None)


def _is_container(module: nn.Module) -> bool:
    """Whether the module has no code that calls its children, or that of a Sequential."""
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)
