"""fuse_activations in Sequentials and in timm's layers; the report, and errors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.fused_models import (
    Called,
    block,
    fuse_a_copy,
    make_input,
    names,
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
from syncbn.conversion.timm import SyncBatchNormAct
from syncbn.fusion.graph_module import FusedActivation, FusedModule


def test_neighbours_in_a_sequential():
    activation = nn.LeakyReLU(0.2)
    model = nn.Sequential(norm(), nn.ReLU(True), norm(), activation, norm(), nn.SiLU(), norm())
    fused = fuse_a_copy(model, make_input())
    assert [type(m).__name__ for m in fused] == ["SyncBatchNorm", "FusedActivation"] * 3 + [
        "SyncBatchNorm"
    ]
    assert isinstance(fused[1], nn.Identity) and "LeakyReLU(negative_slope=0.2)" in repr(fused[3])
    assert [layer.activation for layer in fused[::2]] == ["relu", "leaky_relu", "silu", None]
    assert fused[2].negative_slope == 0.2
    report = explain_fusion(model)
    assert names(report) == [("0", "relu", False), ("2", "leaky_relu", False), ("4", "silu", False)]
    assert report.left == [("6", "is followed by nothing in its Sequential")]
    assert fuse_activations(model) is model
    reverted = revert_sync_batchnorm(model.eval())
    assert reverted is model and model[3] is activation
    assert not any(module.training for module in model.modules())


def test_sequential_that_only_constructs_itself_and_has_hooks():
    class ConvBlock(nn.Sequential):
        def __init__(self):
            super().__init__(norm(), nn.ReLU())

    model, calls = ConvBlock(), []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    assert names(explain_fusion(fuse_activations(model))) == [("0", "relu", False)]
    model(make_input())
    assert calls == ["hook"]


def test_an_activation_in_several_sequentials_is_replaced_where_a_layer_precedes_it():
    relu = nn.ReLU()
    model = nn.Sequential(norm(), relu, nn.Conv2d(3, 3, 1).double(), relu, norm(), relu)
    fused = fuse_a_copy(model, make_input())
    assert type(fused[3]) is nn.ReLU
    reverted = revert_sync_batchnorm(fused)
    assert reverted[1] is reverted[3] is reverted[5] and type(reverted[1]) is nn.ReLU


def hooked(module, register="register_forward_hook"):
    getattr(module, register)(lambda *_: None)
    return module


def sequentials_that_are_left():
    layer = norm()
    yield [layer, nn.ReLU(), layer], "is registered at several positions"
    yield [nn.BatchNorm2d(3).double(), nn.ReLU()], "is not converted"
    yield [norm(), nn.Hardswish()], "is followed by Hardswish, which cannot be fused"
    yield [norm(), nn.LeakyReLU(-0.1)], "is followed by LeakyReLU, which cannot be fused"
    yield [norm(), type("Loud", (nn.ReLU,), {})()], "is followed by Loud, which cannot be fused"
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        yield [hooked(norm(), f"register_{register}"), nn.ReLU()], "has hooks"
        relu = hooked(nn.ReLU(), f"register_{register}")
        yield [norm(), relu], "is followed by ReLU with hooks, which cannot be fused"
    own = norm()
    own.forward = lambda x: 2 * SyncBatchNorm.forward(own, x)
    yield [own, nn.ReLU()], "has a forward of its own, or has been compiled"
    doubled = type("Doubled", (SyncBatchNorm,), {"forward": lambda self, x: x})(3)
    yield [doubled, nn.ReLU()], "is a Doubled"


@pytest.mark.parametrize(("modules", "why"), [*sequentials_that_are_left()])
def test_sequentials_that_are_left(modules, why):
    model = nn.Sequential(*modules)
    assert reason(model, "0") == why and not explain_fusion(model).fused
    assert [*fuse_activations(model)] == modules and type(model) is nn.Sequential
    assert getattr(model[0], "activation", None) is None


def test_a_sequential_with_a_forward_of_its_own_keeps_its_modules():
    class Collected(nn.Sequential):
        def forward(self, x):
            outputs = [x]
            for module in self:
                outputs.append(module(outputs[-1]))
            return torch.cat(outputs)

    model = Collected(norm(), nn.ReLU())
    assert fuse_activations(model) is model and type(model) is Collected
    assert reason(model, "0") == "its output is used 2 times"


def collect_outputs(m, x):
    outputs = []
    for part in m.parts:
        x = part(x)
        if isinstance(part, SyncBatchNorm):
            outputs.append(x)
    return sum(outputs)


def run_in_halves(m, x):
    y = m.parts[:2](x)
    return m.parts[2:](y) + y


def run_if_positive(m, x):
    return m.parts(x) if x.sum() > 0 else m.parts[1](x)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (collect_outputs, "is run without its Sequential by the code of Block"),
        (run_in_halves, "may be run without its Sequential by the code of Block: torch.fx cannot"),
        (run_if_positive, "may be run without its Sequential by the code of Block: torch.fx can"),
    ],
)
def test_sequentials_whose_parts_are_run_by_code(code, why):
    model = block(code)
    model.parts = nn.Sequential(nn.Conv2d(3, 3, 1).double(), norm(), nn.ReLU())
    assert reason(model, "parts.1").startswith(why)
    assert fuse_activations(model) is model and type(model.parts[2]) is nn.ReLU


def test_sequentials_that_code_runs_as_a_whole():
    model = block(lambda m, x: m.groups[1](m.groups[0](x)))
    model.groups = nn.ModuleList(
        [nn.Sequential(nn.Sequential(norm(), nn.ReLU()), norm(), nn.SiLU()) for _ in range(2)]
    )
    fused = fuse_a_copy(model, make_input())
    assert len(explain_fusion(fused).fused) == 4 and not isinstance(fused, FusedModule)


def timms(act_layer=nn.SiLU, **kwargs):
    timm_layers = pytest.importorskip("timm.layers", exc_type=ImportError)
    layer = timm_layers.BatchNormAct2d(3, act_layer=act_layer, **kwargs).double()
    return convert_sync_batchnorm(nn.Sequential(layer))


@pytest.mark.parametrize("act_layer", [nn.ReLU, nn.LeakyReLU, nn.SiLU])
@pytest.mark.parametrize("training", [True, False])
def test_timms_layer_runs_its_activation_itself(act_layer, training, monkeypatch):
    model = timms(act_layer).train(training)
    separate = copy.deepcopy(model)
    monkeypatch.setattr(SyncBatchNormAct, "fused_activation", lambda self: None)
    expected = separate(make_input())
    monkeypatch.undo()
    monkeypatch.setattr(act_layer, "forward", None)
    torch.testing.assert_close(model(make_input()), expected)  # float64, by its default tolerances
    assert len(explain_fusion(model).fused) == 1


def test_timms_layer_with_something_else_runs_it():
    calls = []
    model = timms(nn.ReLU)
    model[0].act.register_forward_hook(lambda *_: calls.append("act"))
    model(make_input())
    assert calls == ["act"]
    assert reason(model, "0") == "is followed by ReLU with hooks, which cannot be fused"
    model = timms(nn.ReLU, drop_layer=nn.Dropout)
    model[0].drop.p = 1.0
    assert not model(make_input()).any()
    assert reason(model, "0") == "is followed by Dropout, which cannot be fused"
    model = timms(nn.Hardswish)
    assert torch.equal(model(make_input()), F.hardswish(norm()(make_input())))
    model = timms(nn.ReLU)
    model[0].activation = "silu"  # the layer's own activation, which comes first
    torch.testing.assert_close(model(make_input()), F.relu(F.silu(norm()(make_input()))))
    model[0].activation = None
    model[0].drop.register_forward_hook(lambda *_: calls.append("drop"))
    model(make_input())
    assert calls == ["act", "drop"]


def test_report_prints_as_a_table():
    model = nn.Sequential(Called(), nn.BatchNorm2d(3), norm(), nn.LeakyReLU())
    assert str(explain_fusion(model)).splitlines() == [
        "layer     fused with  or why not",
        "0.bn1     relu",
        "0.bn2     + relu",
        "2         leaky_relu",
        "0.down.1              is added to another layer, which is fused",
        "1                     is not converted",
        "3 of 5 batch normalization layers fused",
    ]
    assert str(explain_fusion(nn.ReLU())).endswith("0 of 0 batch normalization layers fused")


def test_single_layers():
    layer = norm()
    assert fuse_activations(layer) is layer
    assert explain_fusion(layer).left == [("", "is the model")]
    assert explain_fusion(SyncBatchNorm(3, activation="silu")).fused == [("", "silu", False)]


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_model_is_an_error_and_nothing_is_changed(whole):
    model = nn.Sequential(norm(), nn.ReLU(), Called())
    if whole:
        model[2] = torch.compile(model[2], backend="eager")
    else:
        model[2].bn1.compile(backend="eager")
    words = "the module '2.*' has been compiled, .*; fuse the model first and compile after that"
    with pytest.raises(ValueError, match=words):
        fuse_activations(model)
    assert type(model[1]) is nn.ReLU and model[0].activation is None
    with pytest.raises(ValueError, match="^the model has been compiled"):
        fuse_activations(torch.compile(nn.Sequential(norm(), nn.ReLU()), backend="eager"))
    # Compiled parts without a layer do no harm.
    model = nn.Sequential(torch.compile(nn.ReLU(), backend="eager"), norm(), nn.ReLU())
    assert isinstance(fuse_activations(model)[2], FusedActivation)


def test_revert_of_a_fused_module_that_has_got_another_class_is_an_error():
    model = nn.Sequential(norm(), fuse_activations(Called()))
    model[1].__class__ = type("Sharded", (type(model[1]),), {})
    with pytest.raises(ValueError, match="changed its class to Sharded, which would be lost"):
        revert_sync_batchnorm(model)
    assert isinstance(model[0], SyncBatchNorm) and type(model[1]).__name__ == "Sharded"


def test_revert_of_a_fused_module_that_has_been_compiled_is_an_error():
    model = torch.compile(fuse_activations(Called()), backend="eager")
    with pytest.raises(ValueError, match="has been fused and then compiled by itself"):
        revert_sync_batchnorm(model)
    assert len(explain_fusion(model).fused) == 2
