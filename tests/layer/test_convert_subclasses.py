"""Conversion of subclasses: those with methods of their own are left alone, and named."""

from typing import Generic, TypeVar

import pytest
import torch
from torch import nn

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


class Doubled(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


def test_subclass_with_its_own_forward_is_left_alone_and_named():
    original = nn.Sequential(nn.Sequential(Doubled(3)), nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match=r"'0\.0' is a Doubled, .* does not synchronize"):
        converted = convert_sync_batchnorm(original)
    assert type(converted[0][0]) is Doubled and type(converted[1]) is SyncBatchNorm


class Frozen(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class Described(nn.BatchNorm2d):
    """Another constructor, another text."""

    def __init__(self, channels):
        super().__init__(channels, eps=0.5)

    def extra_repr(self):
        return "described"


def test_subclass_with_other_methods_is_left_alone_and_named():
    with pytest.warns(UserWarning, match="'0' is a Frozen, .* does not synchronize"):
        converted = convert_sync_batchnorm(nn.Sequential(Frozen(3)))
    assert not converted.train()[0].training


def test_subclass_that_only_constructs_and_describes_itself_is_converted():
    converted = convert_sync_batchnorm(nn.Sequential(Described(3)))
    assert type(converted[0]) is SyncBatchNorm and converted[0].eps == 0.5
    assert type(revert_sync_batchnorm(converted)[0]) is Described


class Annotated(nn.BatchNorm2d):
    scale: float
    activation = nn.ReLU
    # As Python 3.14 makes it of the annotation.
    exec("def __annotate_func__(format): return {'scale': float}")


def test_subclass_with_attributes_that_are_no_methods_is_converted():
    assert type(convert_sync_batchnorm(nn.Sequential(Annotated(3)))[0]) is SyncBatchNorm


class Callable:
    def __call__(self, input):
        return input


class Replaced(nn.BatchNorm2d):
    forward = Callable()


def test_subclass_whose_forward_is_no_function_is_left_alone_and_named():
    with pytest.warns(UserWarning, match="'0' is a Replaced, .* does not synchronize"):
        assert type(convert_sync_batchnorm(nn.Sequential(Replaced(3)))[0]) is Replaced


@pytest.mark.parametrize("convert", [convert_sync_batchnorm, revert_sync_batchnorm])
def test_layer_with_a_forward_of_its_own_instance_is_left_alone_and_named(convert):
    layer = nn.BatchNorm2d(3) if convert is convert_sync_batchnorm else SyncBatchNorm(3)
    layer.forward = lambda input: input
    with pytest.warns(UserWarning, match="'0' is a .*BatchNorm"):
        assert convert(nn.Sequential(layer))[0] is layer


def test_revert_leaves_a_subclass_with_its_own_forward_alone_and_names_it():
    class Tripled(SyncBatchNorm):
        def forward(self, input):
            return 3 * super().forward(input)

    with pytest.warns(UserWarning, match=r"'0' is a Tripled.* still synchronizes"):
        reverted = revert_sync_batchnorm(nn.Sequential(Tripled(3)))
    assert type(reverted[0]) is Tripled


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
    assert type(converted[1]) is SyncBatchNorm
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


def test_layer_that_one_left_alone_shares_with_the_model_is_replaced_in_the_model_only():
    split = Split(3)
    shared = split.auxiliary[0]
    with pytest.warns(UserWarning, match="'0' is a Split"):
        converted = convert_sync_batchnorm(nn.Sequential(split, shared))
    assert split.auxiliary[0] is shared
    assert type(converted[1]) is SyncBatchNorm and converted[1].weight is shared.weight


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("compiled", [True, False])
def test_inside_of_a_layer_left_alone_raises_no_error(compiled):
    layer = Split(3)
    if compiled:
        layer.auxiliary[0].compile(backend="eager")
    else:
        layer.auxiliary[0] = nn.LazyBatchNorm2d()
    with pytest.warns(UserWarning, match="'0' is a Split"):
        convert_sync_batchnorm(nn.Sequential(layer))


def test_parametrized_layer_is_left_alone_and_named():
    layer = nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(3), "weight", dim=0)
    with pytest.warns(UserWarning, match="'0' is a ParametrizedBatchNorm2d"):
        convert_sync_batchnorm(nn.Sequential(layer))


class FreezingMixin(nn.Module):
    def train(self, mode=True):
        return super().train(False)


class Mixed(nn.BatchNorm2d, FreezingMixin):
    pass


def test_methods_of_a_mixin_behind_the_layers_class_count_as_its_own():
    with pytest.warns(UserWarning, match="'0' is a Mixed, .* does not synchronize") as caught:
        converted = convert_sync_batchnorm(nn.Sequential(Mixed(3)))
    assert not converted.train()[0].training
    assert caught[0].filename == __file__


T = TypeVar("T")


class Typed(nn.BatchNorm2d, Generic[T]):
    pass


def test_type_parameters_are_no_methods():
    assert type(convert_sync_batchnorm(nn.Sequential(Typed(3)))[0]) is SyncBatchNorm


def test_subclass_of_torchs_synchronized_layer_is_said_to_stay_torchs():
    class Tripled(nn.SyncBatchNorm):
        def forward(self, input):
            return 3 * super().forward(input)

    with pytest.warns(UserWarning, match="'0' is a Tripled, .* stays torch's"):
        convert_sync_batchnorm(nn.Sequential(Tripled(3)))
