"""Layers and models that conversion refuses, and changes that fail: the model stays as it was."""

import pytest
import torch
from torch import nn

import syncbn.conversion.convert
import syncbn.fusion.fuse
from syncbn import (
    SyncBatchNorm,
    SyncBatchNorm2d,
    convert_sync_batchnorm,
    explain_fusion,
    fuse_activations,
    revert_sync_batchnorm,
)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.trouble(
    "“run one batch” through the model before converting it",
    "A lazy layer does not know its number of channels yet",
    "Call the model once, then convert it",
)
def test_lazy_layer_is_an_error_and_nothing_is_changed():
    original = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="'1' is a LazyBatchNorm2d.*run one batch"):
        convert_sync_batchnorm(original)
    assert type(original[0]) is nn.BatchNorm2d
    original(torch.rand(2, 3, 4, 4))
    assert type(convert_sync_batchnorm(original)[1]) is SyncBatchNorm2d


# torch's own warning: its quantization is deprecated.
@pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.ao:FutureWarning")
def test_model_that_awaits_prepare_qat_is_an_error_and_nothing_is_changed():
    original = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    fused = torch.ao.quantization.fuse_modules_qat(original.train(), [["0", "1"]])
    with pytest.raises(ValueError, match="'0' is a ConvBn2d of fuse_modules_qat, .*prepare_qat"):
        convert_sync_batchnorm(fused)
    assert type(fused[0][1]) is type(fused[2]) is nn.BatchNorm2d


@pytest.mark.parametrize(
    "function",
    [convert_sync_batchnorm, revert_sync_batchnorm, fuse_activations, explain_fusion],
)
def test_not_a_module(function):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, but got dict"):
        function({})


def test_wrong_group_changes_nothing():
    original = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(TypeError, match="expected process_group to be a torch.distributed.Pro"):
        convert_sync_batchnorm(original, process_group=[0, 1])
    assert type(original[1]) is nn.BatchNorm2d


class Locked(nn.BatchNorm2d):
    """Refuses to set or delete attributes."""

    def __setattr__(self, name, value):
        if "locked" in vars(self):
            raise AttributeError(f"no setting {name}")
        super().__setattr__(name, value)

    def __delattr__(self, name):
        raise AttributeError(f"no deleting {name}")


def test_layer_that_refuses_to_set_attributes():
    layer = Locked(3)
    vars(layer)["locked"] = True
    model = fuse_activations(convert_sync_batchnorm(nn.Sequential(layer, nn.ReLU())))
    assert isinstance(layer, SyncBatchNorm) and layer.activation == "relu"
    model(torch.rand(2, 3, 4, 4))
    revert_sync_batchnorm(model)
    assert type(layer) is Locked and vars(layer).keys() == {*vars(nn.BatchNorm2d(3)), "locked"}


class Fixed(nn.BatchNorm2d):
    """Refuses to set its class, once it is complete."""

    @property
    def __class__(self):
        return Fixed


class Unreadable(nn.BatchNorm2d):
    @property
    def activation(self):
        raise ValueError("not yet")


def held(model):
    modules = [*model.modules()]
    return [(type(m), dict(vars(m)), dict(m._modules)) for m in modules]


@pytest.mark.parametrize(("cls", "why"), [(Fixed, "no setter"), (Unreadable, "not yet")])
def test_conversion_that_fails_half_way_changes_nothing_and_names_the_layer(cls, why):
    model = nn.Sequential(SyncBatchNorm(3), nn.BatchNorm2d(3), nn.Sequential(cls(3)))
    model.bound = model[1].forward
    before = held(model)
    with pytest.raises(TypeError, match=rf"layer '2\.0' is a {cls.__name__}, and no .*{why}"):
        convert_sync_batchnorm(model)
    assert held(model) == before


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(x).relu()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("why")], ids=repr)
@pytest.mark.parametrize(
    "change", [convert_sync_batchnorm, revert_sync_batchnorm, fuse_activations]
)
def test_change_that_fails_half_way_changes_nothing(monkeypatch, change, error):
    model = nn.Sequential(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), Block(), Block())
    if change is not convert_sync_batchnorm:
        convert_sync_batchnorm(model)
    if change is revert_sync_batchnorm:
        fuse_activations(model)
    module = syncbn.fusion.fuse if change is fuse_activations else syncbn.conversion.convert
    original, calls = module.set_class, []

    def set_class(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        original(*arguments)

    monkeypatch.setattr(module, "set_class", set_class)
    before = held(model)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            change(model)
    else:
        name = "2" if change is fuse_activations else "1.norm"
        with pytest.raises(TypeError, match=rf"the layer '{name}' is a \w+,? and .*: why"):
            change(model)
    assert held(model) == before


@pytest.mark.filterwarnings("error")
def test_warning_that_is_an_error_leaves_the_model_unchanged():
    model = nn.Sequential(nn.BatchNorm2d(3), Locked(3))
    model[1].forward = lambda input: input
    before = held(model)
    with pytest.raises(UserWarning, match="'1' is a Locked"):
        convert_sync_batchnorm(model)
    assert held(model) == before
