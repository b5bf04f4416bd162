"""freeze_statistics, and unfreeze_statistics, which restores the state before."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.prune import l1_unstructured
from torch.optim.swa_utils import AveragedModel, update_bn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    revert_sync_batchnorm,
    unfreeze_statistics,
)


def make_model():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    return convert_sync_batchnorm(model)


def make_input(seed=0):
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) + 3


def modes(model):
    return [module.training for module in model.modules()]


def flags(model):
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


@pytest.mark.works("`freeze_statistics`: layers stay in evaluation through `train()`")
def test_layers_stay_in_evaluation():
    model = make_model()
    keys = model.state_dict().keys()
    freeze_statistics(model)
    assert modes(model) == [True, True, False, True, True]
    assert modes(model.eval().train()) == [True, True, False, True, True]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model(make_input()).sum().backward()
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert model[1].weight.grad.abs().sum() > 0 and model[1].bias.grad is not None
    expected = nn.BatchNorm2d(4).eval()(model[0](make_input()))
    torch.testing.assert_close(model[1](model[0](make_input())), expected, rtol=0, atol=0)
    assert model.state_dict().keys() == keys
    assert model[1].train() is model[1]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("training", [True, False])
def test_unfreezing_restores_modes_and_flags(affine, asked, training):
    model = make_model().train(training)
    model[1].bias.requires_grad_(False)
    model[0].weight.requires_grad_(False)
    before, attributes = flags(model), set(vars(model[1]))
    for _ in range(2):  # the second call changes nothing
        freeze_statistics(model, affine=affine)
    assert flags(model) == {**before, "1.weight": not affine}
    if asked is not None:
        model.train(asked)
    for _ in range(2):
        unfreeze_statistics(model)
    assert flags(model) == before
    assert modes(model) == [training if asked is None else asked] * 5
    assert set(vars(model[1])) == attributes
    assert modes(model.eval()) == [False] * 5 and modes(model.train()) == [True] * 5


def test_a_layer_that_was_in_evaluation_returns_to_it():
    model = make_model()
    model[1].eval()
    freeze_statistics(model)
    unfreeze_statistics(model)
    assert not model[1].training


def test_the_last_call_decides_on_weight_and_bias():
    model = make_model()
    freeze_statistics(model, affine=True)
    freeze_statistics(model)
    assert all(flags(model).values())
    freeze_statistics(model, affine=True)
    assert not flags(model)["1.weight"] and not flags(model)["1.bias"]
    unfreeze_statistics(model)
    assert all(flags(model).values())


def test_flags_that_were_set_while_frozen_stay():
    model = make_model()
    freeze_statistics(model)
    model[1].weight.requires_grad_(False)
    unfreeze_statistics(model)
    assert not model[1].weight.requires_grad


def test_layers_that_share_a_weight():
    model = nn.Sequential(SyncBatchNorm(3), SyncBatchNorm(3))
    model[1].weight = model[0].weight
    freeze_statistics(model, affine=True)
    assert not any(flags(model).values())
    unfreeze_statistics(model)
    assert all(flags(model).values())


def test_layers_without_bias():
    layer = SyncBatchNorm(3, bias=False)
    freeze_statistics(layer, affine=True)
    assert not layer.weight.requires_grad
    unfreeze_statistics(layer)
    assert layer.weight.requires_grad and layer.bias is None


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_frozen_independently(duplicate):
    layer = SyncBatchNorm(3)
    freeze_statistics(layer, affine=True)
    other = duplicate(layer)
    assert not other.train().training
    other.eval()
    unfreeze_statistics(layer)
    assert layer.training and layer.weight.requires_grad
    assert not other.train().training
    unfreeze_statistics(other)
    assert other.training and other.weight.requires_grad


class Loud(nn.BatchNorm2d):
    def train(self, mode=True):
        self.loud = mode
        return super().train(mode)


def test_a_subclass_with_a_train_of_its_own():
    model = convert_sync_batchnorm(nn.Sequential(Loud(3)))
    freeze_statistics(model)
    model.train()
    assert isinstance(model[0], Loud) and model[0].loud and not model[0].training


def test_update_bn_keeps_frozen_statistics():
    model = make_model()
    freeze_statistics(model)
    averaged = AveragedModel(model)
    averaged.module[1].running_mean += 1
    with pytest.warns(UserWarning, match="of the layer '1' are frozen and were not reset"):
        update_bn([make_input()], averaged)
    assert averaged.module[1].running_mean.tolist() == [1.0] * 4


def prune(layer):
    l1_unstructured(layer, "weight", 0.5)
    return layer.weight_orig


def parametrize(layer):
    register_parametrization(layer, "weight", nn.Softplus())
    return layer.parametrizations.weight.original


@pytest.mark.parametrize("change", [prune, parametrize])
def test_parameters_that_weights_are_made_of_are_frozen(change):
    model = make_model()
    original = change(model[1])
    freeze_statistics(model, affine=True)
    assert not original.requires_grad and not model[1].bias.requires_grad
    unfreeze_statistics(model)
    assert original.requires_grad and model[1].bias.requires_grad


def test_only_our_layers_and_those_with_statistics():
    model = nn.Sequential(
        nn.BatchNorm2d(3), SyncBatchNorm(3), SyncBatchNorm(3, track_running_stats=False)
    )
    freeze_statistics(model, affine=True)
    assert [layer.training for layer in model.train()] == [True, False, True]
    assert [layer.weight.requires_grad for layer in model] == [True, False, True]


@pytest.mark.parametrize("function", [freeze_statistics, unfreeze_statistics])
def test_models_without_our_layers(function):
    with pytest.raises(ValueError, match=r"this Sequential has none; call syncbn\.convert_sync_b"):
        function(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, but got int"):
        function(3)


def test_models_without_statistics():
    with pytest.raises(ValueError, match="all of this SyncBatchNorm have track_running_stats=Fals"):
        freeze_statistics(SyncBatchNorm(3, track_running_stats=False))


def test_conversion_keeps_layers_frozen_and_revert_unfreezes_them():
    model = make_model()
    freeze_statistics(model, affine=True)
    assert not convert_sync_batchnorm(model).train()[1].training
    reverted = revert_sync_batchnorm(model)
    assert type(reverted[1]) is nn.BatchNorm2d
    assert vars(reverted[1]).keys() == vars(nn.BatchNorm2d(4)).keys()
    assert reverted.train()[1].training


def test_fused_layers():
    model = fuse_activations(make_model())
    x = make_input()
    freeze_statistics(model)
    model[3].eval()
    assert torch.equal(model(x), model.eval()(x)) and not model.train()[1].training
