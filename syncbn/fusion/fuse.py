"""fuse_activations() and explain_fusion()."""

from typing import Any, NamedTuple

import torch
from torch import nn

from syncbn import _compat
from syncbn._compat import BatchNormBase
from syncbn.conversion.classes import restored_on_error, set_class
from syncbn.conversion.derived import cannot_take_its_place
from syncbn.conversion.timm import SyncBatchNormAct
from syncbn.fusion import capture, graph_module, patterns
from syncbn.fusion.tracer import TraceError
from syncbn.modules import ModuleT, SyncBatchNorm
from syncbn.ops import epilogue
from syncbn.pickles import RECONSTRUCTIONS


class FusedLayer(NamedTuple):
    """A layer that applies an activation, and whether it adds a residual before it."""

    name: str
    activation: str
    residual: bool


class LeftLayer(NamedTuple):
    """A layer that applies no activation, and the reason."""

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
    """Fuse activations and additions into the SyncBatchNorm layers that they follow.

    A fused layer makes no more passes over memory in training than a layer without activation.
    ReLU, LeakyReLU and SiLU are fused directly after a layer: in an ``nn.Sequential``, in timm's
    ``BatchNormAct2d`` (conversion does that) and in the code of a module, if ``torch.fx`` can trace
    it. In code they are also fused after the addition of a value of the same shape and dtype.
    Results, state_dict and parameters do not change. :func:`explain_fusion` lists the other layers
    and the reasons; :func:`syncbn.revert_sync_batchnorm` undoes the fusion.

    Convert before and compile after this call. In a Sequential an identity replaces the activation,
    and the layer applies it, also in a slice of the Sequential. A module with fused code gets a
    class that derives from its own class and runs a graph. The graph keeps the attributes and
    globals that the code reads, except ``training`` and tensors, as they are at this call. Code
    that calls ``isinstance()`` on a value, or ``type()``, is not fused. Replace modules and change
    code before the call or after a revert. All ranks must fuse the same layers, because a layer
    with an addition runs later, at the addition.

    Args:
        model: The model, with converted layers; changed in place.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module, or the class of a module whose code is to be fused
            cannot be replaced.
        ValueError: The model, or a module in it that contains layers, has been compiled.

    The model is unchanged where an error is raised.

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
    classes = plan.fused_classes()  # before the first change, because it may raise
    with restored_on_error(list(model.modules())):
        for layer, parent, name, follower, (activation, slope) in plan.neighbours:
            _compat.children(parent)[name] = graph_module.FusedActivation(layer, follower)
            vars(layer).update(activation=activation, negative_slope=slope)
        for module, cls in classes.items():
            try:
                set_class(module, cls)
            except Exception as error:
                name = next(name for name, found in model.named_modules() if found is module)
                raise cannot_take_its_place(module, name, error) from error
    return model


def _fused_later(module: Any) -> Any:
    """Return a copy of a fused module, before it gets its attributes."""
    if isinstance(module, nn.Module):
        set_class(module, graph_module.fused_class(type(module), __setstate__=_set_state))
    return module


def _set_state(module: graph_module.FusedModule, state: Any) -> None:
    """Set the attributes of a copy, and fuse the layers that its own code calls."""
    super(graph_module.FusedModule, module).__setstate__(state)
    set_class(module, module._syncbn_original)
    cls = _Plan(module).fused_classes().get(module)
    if cls is not None:
        set_class(module, cls)


RECONSTRUCTIONS["fused"] = lambda make, arguments: _fused_later(make(*arguments))
# Of pickles before "fused".
RECONSTRUCTIONS["fused_module"] = lambda cls, *arguments: _fused_later(cls.__new__(cls, *arguments))


def explain_fusion(model: nn.Module) -> FusionReport:
    """Report the layers that :func:`fuse_activations` fuses or has fused; change nothing.

    Args:
        model: The model.

    Returns:
        The ``fused`` layers, and the layers that are ``left``, each with the reason.

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
    report = FusionReport([], [])
    for name, found in _Plan(model).layers.items():
        if isinstance(found, str):
            report.left.append(LeftLayer(name, found))
        else:
            report.fused.append(FusedLayer(name, *found))
    return report


def _check_not_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        is_compiled = _compat.is_compiled(module) or _compat.compiled_original(module) is not None
        if is_compiled and any(isinstance(layer, SyncBatchNorm) for layer in module.modules()):
            what = f"the module {name!r}" if name else "the model"
            raise ValueError(
                f"{what} has been compiled, and the compiled code would run unchanged; fuse the "
                "model first and compile after that"
            )


class _Neighbours(NamedTuple):
    """A layer and the activation after it in a Sequential."""

    layer: SyncBatchNorm
    parent: nn.Module  # the Sequential
    name: str  # of the activation, in it
    follower: nn.Module  # the activation
    activation: tuple[str, float]  # its name and slope


class _Plan:
    """The fusions that a model allows: neighbours in Sequentials, and graphs of modules."""

    def __init__(self, model: nn.Module) -> None:
        self.neighbours: list[_Neighbours] = []
        # The new graphs of modules, with the fused calls.
        self.graphs: dict[nn.Module, torch.fx.Graph] = {}
        # By the layer's name: its activation and whether it adds a residual, or why not.
        self.layers: dict[str, tuple[str, bool] | str] = {}
        # Each module's parents, with its name in them.
        self._parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        # The results of _called_by().
        self._called: dict[nn.Module, set[nn.Module] | str] = {}
        for parent in model.modules():
            for name, child in _compat.children(parent).items():
                if child is not None:
                    self._parents.setdefault(child, []).append((parent, name))
        in_code: dict[nn.Module, dict[nn.Module, str]] = {}
        for name, layer in model.named_modules():
            if not isinstance(layer, BatchNormBase):
                continue
            found = self._by_itself(layer) or self._in_sequential(layer)
            if found is None:
                caller, found = self._caller_of(layer)
                if caller is not None:
                    in_code.setdefault(caller, {})[layer] = name
            self.layers[name] = found
        for caller, names in in_code.items():
            self._trace(caller, names)

    def fused_classes(self) -> dict[nn.Module, type[graph_module.FusedModule]]:
        """Return the modules whose code is to be fused, each with its new class."""
        classes = {}
        for module, graph in self.graphs.items():
            traced = torch.fx.GraphModule(module, graph)
            if getattr(module, "_syncbn_code", None) != traced.code:
                cls = graph_module.original_class(module)
                names = {"forward": type(traced).forward, "_syncbn_code": traced.code}
                classes[module] = graph_module.fused_class(cls, **names)
        return classes

    def _by_itself(self, layer: nn.Module) -> tuple[str, bool] | str | None:
        """Return the layer's entry if its class or attributes decide it."""
        if not isinstance(layer, SyncBatchNorm):
            return "is not converted"
        if layer._syncbn_takes_activation and layer.activation is not None:
            return layer.activation, False
        if isinstance(layer, SyncBatchNormAct):
            activation = layer.fused_activation()
            if activation is not None:
                return activation[0], False
            follower = layer.drop if type(layer.drop) is not nn.Identity else layer.act
            return f"is followed by {patterns.kind_of(follower)}, which cannot be fused"
        if type(layer).forward is not SyncBatchNorm.forward:
            return f"is a {type(layer).__name__}"
        if _compat.has_hooks(layer):
            return "has hooks"
        if not graph_module.is_bare(layer):
            return "has a forward of its own, or has been compiled"
        if len(self._parents.get(layer, ())) > 1:
            return "is registered at several positions"
        return None

    def _in_sequential(self, layer: nn.Module) -> tuple[str, bool] | str | None:
        """Return the layer's entry if the next module of its Sequential decides it."""
        if layer not in self._parents:
            return "is the model"
        ((parent, name),) = self._parents[layer]
        # Hooks of the Sequential may stay: they see its input and output.
        if type(parent).forward is not nn.Sequential.forward or "forward" in vars(parent):
            return None
        siblings = [*_compat.children(parent).items()]
        position = [name for name, _ in siblings].index(name) + 1
        if position == len(siblings):
            return None
        name, sibling = siblings[position]
        if sibling is None or (activation := epilogue.of_module(sibling)) is None:
            return f"is followed by {patterns.kind_of(sibling)}, which cannot be fused"
        reason = self._why_in_parts(parent)
        if reason is not None:
            return reason
        assert isinstance(layer, SyncBatchNorm)
        self.neighbours.append(_Neighbours(layer, parent, name, sibling, activation))
        return activation[0], False

    def _why_in_parts(self, sequential: nn.Module) -> str | None:
        """Return why other code may run the parts of a Sequential; None if no code does."""
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

    def _called_by(self, module: nn.Module) -> set[nn.Module] | str:
        """Return the modules that a module's code calls, or why they are not known."""
        if module not in self._called:
            try:
                self._called[module] = capture.called_modules(module)
            except TraceError as reason:
                self._called[module] = str(reason)
        return self._called[module]

    def _caller_of(self, layer: nn.Module) -> tuple[nn.Module | None, str]:
        """Return the module whose code may call the layer, or None and why there is none."""
        module = layer
        while module in self._parents:
            if len(self._parents[module]) > 1:
                return None, "is registered at several positions"
            ((module, _),) = self._parents[module]
            if not _is_container(module):
                return module, "is not called by the code of its module"
        return None, "is followed by nothing in its Sequential"

    def _trace(self, module: nn.Module, names: dict[nn.Module, str]) -> None:
        """Find the layers, of these names, that can be fused in a module's code."""
        inlined = {m for m in module.modules() if m is not module and capture.is_sequential(m)}
        try:
            found = patterns.find(module, capture.trace(module, inlined), names)
            # A Sequential without a fused layer is called as before.
            fused = [layer for layer, match in found.items() if isinstance(match, patterns.Match)]
            graph = capture.trace(module, inlined & self._between(fused, module))
        except TraceError as reason:
            self.layers.update(dict.fromkeys(names.values(), str(reason)))
            return
        matches = patterns.find(module, graph, names)
        for layer, match in found.items():
            if isinstance(match, patterns.Match):  # a Sequential that is a call may change it
                match = matches[layer]
            self.layers[names[layer]] = _entry(match)
        to_fuse = [match for match in matches.values() if isinstance(match, patterns.Match)]
        if to_fuse:
            patterns.fuse(module, graph, to_fuse)
            self.graphs[module] = graph

    def _between(self, layers: list[nn.Module], module: nn.Module) -> set[nn.Module]:
        """Return the modules that contain one of the layers and are inside the module."""
        between: set[nn.Module] = set()
        for child in layers:
            while child is not module:
                between.add(child)
                ((child, _),) = self._parents[child]
        return between


def _entry(match: patterns.Match | str) -> tuple[str, bool] | str:
    return match if isinstance(match, str) else (match.activation[0], match.addition is not None)


def _is_container(module: nn.Module) -> bool:
    """Whether the module has no code that calls its children, or a Sequential's."""
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)
