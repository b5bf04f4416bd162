"""Fused models later on: results, copies, hooks, replaced parts, and revert."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.fused_models import (
    Block,
    Called,
    assert_same,
    block,
    fuse_a_copy,
    make_input,
    norm,
    reason,
)
from torch import nn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    explain_fusion,
    fuse_activations,
    revert_sync_batchnorm,
)
from syncbn.batch_norm import BatchNorm
from syncbn.fusion.graph_module import FusedModule


def test_fusing_again_changes_nothing():
    model = fuse_activations(nn.Sequential(Called(), norm(), nn.ReLU()))
    report, modules = explain_fusion(model), [*model.modules()]
    cls, code = type(model[0]), model[0]._syncbn_code
    assert fuse_activations(model) is model and explain_fusion(model) == report
    assert [*model.modules()] == modules
    assert type(model[0]) is cls and model[0]._syncbn_code is code
    assert report == explain_fusion(nn.Sequential(Called(), norm(), nn.ReLU()))


def loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = [copy.deepcopy, loaded, lambda model: pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize("make_copy", COPIES)
def test_copies_and_pickles(make_copy):
    model = fuse_activations(nn.Sequential(Called(), norm(), nn.LeakyReLU(0.2)))
    model[0].register_buffer("scratch", torch.ones(1), persistent=False)
    model[0].note, model[0].nothing = "kept", None
    model[0].register_module("missing", None)
    model.eval()[0].bn1.train()
    other = make_copy(model)
    assert [*other.state_dict()] == [*model.state_dict()]
    assert isinstance(other[0], FusedModule) and isinstance(other[0], Called)
    assert other[0].note == "kept" and other[0].missing is None
    assert not other.training and other[0].bn1.training and not other[0].training
    assert not {*map(id, other.parameters())} & {*map(id, model.parameters())}
    assert_same(model, other, make_input())
    assert explain_fusion(other) == explain_fusion(model)
    reverted = revert_sync_batchnorm(other)
    assert type(reverted[0]) is Called and type(reverted[2]) is nn.LeakyReLU
    # The copy has traced its own graph.
    assert type(model[0]) is not type(other[0])


def test_pickled_modules_keep_additions_in_place():
    model = fuse_activations(Added())
    x, other = make_input().float(), make_input(1)
    assert loaded(model)(x, other).dtype == model(x, other).dtype == torch.float32


class Added(Block):
    def __init__(self):
        super().__init__()
        self.float()

    def forward(self, x, other):
        x = self.relu(self.bn1(x))
        x += other
        return x


def test_shallow_copies_share_their_children():
    model = fuse_activations(Called())
    other = copy.copy(model)
    assert other.bn1 is model.bn1 and isinstance(other, FusedModule)
    x = make_input()
    assert torch.equal(other(x), model(x))


def test_the_module_stays_the_same_object():
    model, calls = Called(), []
    model.register_forward_hook(lambda module, *_: calls.append(module))
    model.note = "kept"
    assert fuse_activations(model) is model
    assert isinstance(model, Called) and isinstance(model, FusedModule)
    assert type(model).__name__ == "FusedCalled" and model.note == "kept"
    x = make_input()
    model(x)
    assert calls == [model]
    assert "self.down(" in model._syncbn_code  # a call, as before
    # Methods call layers that have no activation of their own.
    assert torch.equal(model.features(x), F.relu(copy.deepcopy(model.bn1)(model.conv1(x))))
    assert not model.eval().bn1.training and model.train().bn1.training


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_added_later_run_and_see_unfused_values(register):
    model, seen = fuse_activations(Called()), []
    model.relu.inplace = False  # else it overwrites the hook's tensor

    def hook(module, inputs, outputs):
        seen.append((module, outputs))

    getattr(model.bn1, register)(hook)
    x = make_input().requires_grad_()
    model(x).sum().backward()
    assert [module for module, _ in seen] == [model.bn1]
    if register == "register_forward_hook":
        assert (seen[0][1] < 0).any()  # before the activation
    assert reason(model) == "has hooks"


def test_a_layer_that_is_replaced_later_is_called():
    model = Called()
    x = make_input()
    expected = model(x)
    fuse_activations(model).bn1 = nn.BatchNorm2d(3).double()
    torch.testing.assert_close(model(x), expected)  # float64, by its default tolerances
    model.bn2.activation = "silu"  # then precedes the addition
    other = Called()
    other.bn2.activation = "silu"
    torch.testing.assert_close(model(x), other(x))


def test_fused_places_call_the_layers_own_fused_pass(monkeypatch):
    """The fused places reach the layer's own passes, and those of other shapes do not."""
    model, seen = fuse_activations(Called()), []

    def spy(layer, input, residual, activation, slope, mask=None):
        seen.append((residual is not None, activation, slope))
        return original(layer, input, residual, activation, slope, mask)

    original = SyncBatchNorm._syncbn_forward
    monkeypatch.setattr(SyncBatchNorm, "_syncbn_forward", spy)
    model(make_input())
    plain = (False, None, 0.01)
    assert seen == [(False, "relu", 0.01), plain, (True, "relu", 0.01)]


def test_an_activation_that_changes_later_is_called():
    model = fuse_activations(block(lambda m, x: m.leaky(m.bn1(x)) + m.silu(m.bn2(x))))
    x = make_input()
    model.leaky.negative_slope = 0.7
    model.silu = nn.GELU()
    other = block(lambda m, x: m.leaky(m.bn1(x)) + m.silu(m.bn2(x)))
    other.leaky.negative_slope = 0.7
    other.silu = nn.GELU()
    torch.testing.assert_close(model(x), other(x))  # float64, by its default tolerances
    seen = []
    model.leaky.register_forward_hook(lambda *_: seen.append("leaky"))
    model(x)
    assert seen == ["leaky"]


@pytest.mark.parametrize("is_first", [False, True])
def test_the_output_has_the_memory_format_of_the_first_addend(is_first):
    def code(m, x, other):
        y = m.bn1(x)
        return m.relu(other + y if is_first else y + other)

    model = block(code, inputs=2)
    x = make_input().contiguous(memory_format=torch.channels_last)
    fused = fuse_a_copy(model, x, make_input(1))
    assert isinstance(fused, FusedModule)
    assert fused(x, make_input(1)).stride() == model(x, make_input(1)).stride()


class Addend:
    """Adds itself, in its own order."""

    def __radd__(self, other):
        return other * 2

    def __add__(self, other):
        return other * 3


@pytest.mark.parametrize("is_first", [False, True])
def test_the_order_of_addends_stays(is_first):
    model = block(lambda m, x, other: m.relu(other + m.bn1(x) if is_first else m.bn1(x) + other), 2)
    fused = fuse_activations(copy.deepcopy(model))
    assert isinstance(fused, FusedModule)
    assert torch.equal(fused(make_input(), Addend()), model(make_input(), Addend()))


def test_the_report_names_the_fused_layers():
    """If the Sequential is called as a whole, its changes of the input are unknown."""

    def code(m, x):
        y = m.bn1(m.parts(x))
        return m.relu(y + m.conv2(x))

    model = block(code)
    model.parts = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1).double())
    report = explain_fusion(model)
    fused = fuse_a_copy(model, make_input())
    assert isinstance(fused, FusedModule) == bool(report.fused)
    assert ("normalize" in getattr(fused, "_syncbn_code", "")) == bool(report.fused)


def test_a_class_is_not_told_of_its_fused_class():
    class Registered(Block):
        def __init_subclass__(cls, **options):
            raise TypeError("no more of them")

        def forward(self, x):
            return self.relu(self.bn1(x))

    assert isinstance(fuse_a_copy(Registered(), make_input()), Registered)


def test_revert_gives_back_the_slope_that_the_layer_had():
    model = nn.Sequential(SyncBatchNorm(3, negative_slope=0.3), nn.LeakyReLU(0.2))
    fuse_activations(model)
    assert model[0].negative_slope == 0.2
    layer = model[0]
    revert_sync_batchnorm(model)
    assert layer.negative_slope == 0.3


def test_conversion_after_fusion_keeps_it():
    model = fuse_activations(nn.Sequential(Called(), norm(), nn.ReLU()))
    report = explain_fusion(model)
    assert convert_sync_batchnorm(model) is model and explain_fusion(model) == report
    assert model[0].bn1._syncbn.identity.name == "0.bn1"


def test_a_symbolic_trace_of_a_fused_model():
    model = fuse_activations(nn.Sequential(Called(), norm(), nn.ReLU()))
    traced = torch.fx.symbolic_trace(model)
    assert str(traced.code).count("normalize_add_activate(") == 1
    assert_same(model, traced, make_input())


def test_revert_undoes_fusion():
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU(), convert_and_revert(Called())
    ).double()
    text, keys, attributes = str(model), [*model.state_dict()], {*vars(model[3])}
    modules = [*model.modules()]
    fused = fuse_activations(convert_sync_batchnorm(model))
    assert len(explain_fusion(fused).fused) == 3
    converted = copy.deepcopy(fused)
    reverted = revert_sync_batchnorm(fused)
    assert reverted is model and str(model) == text and [*model.state_dict()] == keys
    assert type(model[3]) is Called and {*vars(model[3])} == attributes
    others = [m for m in modules if not isinstance(m, nn.BatchNorm2d)]
    kept = [m for m in model.modules() if not isinstance(m, nn.BatchNorm2d)]
    assert kept == others and type(model[1]) is nn.BatchNorm2d
    assert not {"activation", "negative_slope"} & {*vars(model[1])}
    assert_same(converted, model, make_input())
    again = fuse_activations(convert_sync_batchnorm(model))
    assert explain_fusion(again) == explain_fusion(converted)


def convert_and_revert(model):
    """A copy with layers of torch's."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, SyncBatchNorm):
                setattr(parent, name, nn.BatchNorm2d(3))
    return model


def test_an_activation_of_the_layers_own_stays_in_the_reverted_layer():
    layer = SyncBatchNorm(3, activation="leaky_relu", negative_slope=0.2, dtype=torch.float64)
    x, residual = make_input(), make_input(1)
    expected = layer(x, residual)
    reverted = revert_sync_batchnorm(nn.Sequential(copy.deepcopy(layer)))[0]
    assert type(reverted) is BatchNorm
    assert repr(reverted).endswith("activation='leaky_relu', negative_slope=0.2)")
    reverted.reset_running_stats()
    # float64, by its default tolerances
    torch.testing.assert_close(reverted(x, residual), expected)
    torch.testing.assert_close(reverted.running_var, layer.running_var)
    again = convert_sync_batchnorm(nn.Sequential(reverted))[0]
    assert (again.activation, again.negative_slope) == ("leaky_relu", 0.2)
    assert explain_fusion(nn.Sequential(again)).fused == [("0", "leaky_relu", False)]


def test_an_activation_that_was_set_later_stays_as_well():
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    model[0].activation = "relu"
    assert (revert_sync_batchnorm(model)(torch.randn(2, 3, 4, 4)) >= 0).all()
    part = fuse_activations(nn.Sequential(norm(), nn.ReLU()))[:1]
    assert type(part[0]) is SyncBatchNorm
    assert (revert_sync_batchnorm(part)(make_input()) >= 0).all()


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "silu"])
def test_script_takes_reverted_layers(activation, momentum):
    layer = SyncBatchNorm(3, momentum=momentum, activation=activation, negative_slope=0.2)
    layer = revert_sync_batchnorm(layer)
    other, scripted = copy.deepcopy(layer), torch.jit.script(layer)
    x = make_input().float()
    for _ in range(2):
        assert torch.equal(scripted(x, x), other(x, x))
    assert torch.equal(scripted.running_mean, other.running_mean)
    assert torch.equal(scripted.eval()(x), other.eval()(x))
