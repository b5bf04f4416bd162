"""Layers that conversion and its inverse leave alone, and the layers inside of them."""

import pytest
import torch
from torch import nn

from syncbn import SyncBatchNorm, SyncBatchNorm2d, convert_sync_batchnorm, revert_sync_batchnorm


@pytest.mark.parametrize("convert", [convert_sync_batchnorm, revert_sync_batchnorm])
def test_layer_with_a_forward_of_its_own_instance_is_left_alone_and_named(convert):
    layer = nn.BatchNorm2d(3) if convert is convert_sync_batchnorm else SyncBatchNorm(3)
    layer.forward = lambda input: input
    with pytest.warns(UserWarning, match="'0' is a .*BatchNorm"):
        assert convert(nn.Sequential(layer))[0] is layer


class Split(nn.BatchNorm2d):
    """One half of the batch goes through a layer of its own."""

    def __init__(self, channels):
        super().__init__(channels)
        self.auxiliary = nn.ModuleList([nn.BatchNorm2d(channels)])

    def forward(self, input):
        one, other = input.chunk(2)
        return torch.cat([super().forward(one), self.auxiliary[0](other)])


def timms_split(channels):
    timm_layers = pytest.importorskip("timm.layers", exc_type=ImportError)
    return timm_layers.SplitBatchNorm2d(channels)


@pytest.mark.parametrize("split", [Split, timms_split])
def test_layer_that_is_left_alone_keeps_its_inside(split):
    original = nn.Sequential(split(3), nn.BatchNorm2d(3))
    inside = dict(original[0].named_modules())
    with pytest.warns(UserWarning, match=r"'0' is a Split.*does not synchronize") as caught:
        converted = convert_sync_batchnorm(original)
    assert len(caught) == 1
    assert dict(converted[0].named_modules()) == inside
    assert type(converted[1]) is SyncBatchNorm2d
    reverted = revert_sync_batchnorm(converted)
    assert dict(reverted[0].named_modules()) == inside
    assert type(reverted[1]) is nn.BatchNorm2d


class SynchronizedSplit(SyncBatchNorm):
    def __init__(self, channels):
        super().__init__(channels)
        self.auxiliary = nn.ModuleList([SyncBatchNorm(channels)])

    forward = Split.forward


def test_revert_leaves_the_inside_of_a_layer_alone_that_it_leaves_alone():
    original = nn.Sequential(SynchronizedSplit(3), SyncBatchNorm(3))
    inside = dict(original[0].named_modules())
    with pytest.warns(UserWarning, match="'0' is a SynchronizedSplit,.* still synchronizes"):
        reverted = revert_sync_batchnorm(original)
    assert dict(reverted[0].named_modules()) == inside
    assert not isinstance(reverted[1], SyncBatchNorm)


def test_revert_reaches_what_ordinary_layers_hold():
    layer = Split(3)
    layer.auxiliary[0] = convert_sync_batchnorm(layer.auxiliary[0])
    assert type(revert_sync_batchnorm(layer).auxiliary[0]) is nn.BatchNorm2d


def test_layer_in_the_model_and_in_one_left_alone_synchronizes():
    split = Split(3)
    shared = split.auxiliary[0]
    with pytest.warns(UserWarning, match="'0' is a Split"):
        convert_sync_batchnorm(nn.Sequential(split, shared))
    assert split.auxiliary[0] is shared and type(shared) is SyncBatchNorm2d


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_inside_of_a_layer_left_alone_raises_no_error():
    layer = Split(3)
    layer.auxiliary[0] = nn.LazyBatchNorm2d()
    with pytest.warns(UserWarning, match="'0' is a Split"):
        convert_sync_batchnorm(nn.Sequential(layer))


def test_parametrized_layer_is_left_alone_and_named():
    layer = nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(3), "weight", dim=0)
    with pytest.warns(UserWarning, match="'0' is a ParametrizedBatchNorm2d"):
        convert_sync_batchnorm(nn.Sequential(layer))


def test_subclass_of_torchs_synchronized_layer_stays_torchs_and_is_named():
    class Tripled(nn.SyncBatchNorm):
        def forward(self, input):
            return 3 * super().forward(input)

    with pytest.warns(UserWarning, match="'0' is a Tripled, .* stays torch's"):
        convert_sync_batchnorm(nn.Sequential(Tripled(3)))
