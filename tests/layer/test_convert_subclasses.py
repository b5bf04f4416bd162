"""Conversion of subclasses: their code runs on; those that do not synchronize are named."""

import copy
import functools
import pickle
import warnings
from typing import ClassVar, Generic, TypeVar

import pytest
import torch
import torch.nn.functional as F
from support.subclasses import Square, Unchecked, WithoutMethods, images
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from syncbn import (
    SyncBatchNorm,
    SyncBatchNorm2d,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)


def traced(module):
    return torch.jit.trace(module.eval(), torch.rand(2, 3, 4, 4))


class Doubled(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


class ActivatedNorm(nn.BatchNorm2d):
    """Has a module under a name that is an attribute of ours."""

    def __init__(self, channels):
        super().__init__(channels)
        self.activation = nn.SiLU()

    def forward(self, input):
        return self.activation(super(ActivatedNorm, self).forward(input))  # noqa: UP008


class Unwrapping(nn.BatchNorm1d):
    """Hands the base's forward to another function."""

    def forward(self, input):
        return apply_to(super().forward, input)


def apply_to(function, features):
    return {key: function(values) for key, values in features.items()}


class Stepping(nn.BatchNorm2d):
    """Takes sequences of images, as SpikingJelly's layers do; calls the base in another method."""

    @property
    def steps(self):
        return (0, 1)

    def single(self, input):
        return super().forward(input)

    def forward(self, input):
        return self.single(input.flatten(*self.steps)).view_as(input)


INPUTS = {
    Doubled: images,
    ActivatedNorm: images,
    Unwrapping: lambda: {"points": images()[:, :, 0, 0]},
    Stepping: lambda: images().unflatten(0, (2, 2)),
}


def test_pickle_of_a_parametrized_subclass_is_torchs_error():
    layer = convert_sync_batchnorm(nn.Sequential(Doubled(3)))[0]
    register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules is only"):
        pickle.dumps(layer)


@pytest.mark.parametrize("cls", INPUTS)
def test_subclass_whose_forward_calls_the_bases_is_converted(cls):
    layer, x = cls(3).double(), INPUTS[cls]()
    expected = copy.deepcopy(layer)(x)
    converted = convert_sync_batchnorm(nn.Sequential(layer))
    ours = converted[0]
    assert isinstance(ours, cls) and isinstance(ours, SyncBatchNorm)
    assert type(ours).__name__ == f"Sync{cls.__name__}" and f"Sync{cls.__name__}(" in str(converted)
    assert convert_sync_batchnorm(converted)[0] is ours
    torch.testing.assert_close(copy.deepcopy(ours)(x), expected)  # float64, default tolerances
    loaded = pickle.loads(pickle.dumps(ours))
    assert type(loaded) is type(ours)
    torch.testing.assert_close(loaded(x), expected)
    reverted = revert_sync_batchnorm(converted)[0]
    assert type(reverted) is cls and vars(reverted).keys() == vars(cls(3)).keys()
    torch.testing.assert_close(reverted(x), expected)


def test_module_named_activation_of_a_layer_without_methods_stays():
    layer = nn.BatchNorm2d(3)
    layer.activation = nn.ReLU()
    converted = convert_sync_batchnorm(nn.Sequential(layer))
    assert converted[0].activation is layer.activation and isinstance(converted[0], SyncBatchNorm)
    assert (converted(images().float()) < 0).any()
    reverted = revert_sync_batchnorm(converted)[0]
    assert type(reverted) is nn.BatchNorm2d and reverted.activation is layer.activation


class Registered(nn.BatchNorm2d):
    """Keeps a list of its subclasses. Each subclass must give a key."""

    classes: ClassVar = {}

    def __init_subclass__(cls, key):
        Registered.classes[key] = cls


class Keyed(Registered, key="keyed"):
    pass


def test_class_that_registers_subclasses_registers_none_of_ours():
    converted = convert_sync_batchnorm(nn.Sequential(Keyed(3), Registered(3)))
    assert all(isinstance(layer, SyncBatchNorm) for layer in converted)
    assert Registered.classes == {"keyed": Keyed}


class Strict(type):
    def __new__(cls, name, bases, body, **keywords):
        if "key" not in keywords:
            raise ValueError("no key")
        return super().__new__(cls, name, bases, body)


class Final(nn.BatchNorm2d, metaclass=Strict, key=1):
    pass


def test_final_class_is_an_error_and_nothing_is_changed():
    original = nn.Sequential(nn.BatchNorm2d(3), Final(3))
    with pytest.raises(TypeError, match=r"'1' is a Final, and no class can derive .*: no key"):
        convert_sync_batchnorm(original)
    assert type(original[0]) is nn.BatchNorm2d


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own deprecation
@pytest.mark.parametrize("script", [torch.jit.script, traced])
def test_scripted_module_with_batch_normalization_is_named(script):
    scripted = script(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    other = script(nn.Sequential(nn.Conv2d(3, 3, 1)))
    with pytest.warns(UserWarning, match="'0' is scripted .* does not synchronize; ") as caught:
        convert_sync_batchnorm(nn.Sequential(scripted, nn.BatchNorm2d(3), other))
    assert len(caught) == 1


class ByName(nn.BatchNorm2d):
    def forward(self, input):
        return nn.BatchNorm2d.forward(self, input)


class Branch(nn.BatchNorm2d):
    def forward(self, input):
        if input.size(0) > 1:
            return super().forward(input)
        return F.batch_norm(input, None, None, training=True)


class Centered(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input - self.running_mean[:, None, None])


class Handing(nn.BatchNorm2d):
    def forward(self, input):
        return scaled(self, super().forward(input))


def scaled(layer, input):
    return input * layer.eps


class Helped(nn.BatchNorm2d):
    def standardized(self, input):
        return input / input.std()

    def forward(self, input):
        return super().forward(self.standardized(input))


class Without(nn.BatchNorm2d):
    def forward(self, input):
        return input


class Unseen(nn.BatchNorm2d):
    exec("def forward(self, input): return super(Unseen, self).forward(input)")


class Wrapped(nn.BatchNorm2d):
    @functools.wraps(Doubled.forward)
    def forward(self, input):
        return input


class Static(nn.BatchNorm2d):
    forward = staticmethod(F.relu)


class Copying(nn.BatchNorm2d):
    def __deepcopy__(self, memo):
        return self


class Callable:
    def __call__(self, input):
        return input


class Replaced(nn.BatchNorm2d):
    forward = Callable()


class NamedNorm(nn.BatchNorm2d):
    """Computes something of its own with names of the field."""

    def __init__(self, channels):
        super().__init__(channels)
        self.norm_gain = nn.Parameter(torch.full([1], 2.0))

    def forward(self, input):
        return super().forward(input) * self.norm_gain + input.mean()


COOPERATING = [Branch, Centered, Handing, Helped, Unseen, Copying, NamedNorm]


def statistics(rank, world_size, index):
    torch.manual_seed(rank)
    layer = COOPERATING[index](3).double()
    x = images() + rank
    expected = copy.copy(layer).forward(x).shape
    layer = convert_sync_batchnorm(COOPERATING[index](3).double())
    assert layer(x).shape == expected
    return layer.running_mean.tolist()


@pytest.mark.parametrize("index", range(len(COOPERATING)), ids=lambda i: COOPERATING[i].__name__)
def test_class_that_calls_its_bases_forward_synchronizes_whatever_its_code(two_ranks, index):
    one, other = two_ranks.run(statistics, index)
    assert one == other


@pytest.mark.parametrize("cls", [ByName, Without, Wrapped, Static, Replaced])
@pytest.mark.trouble(
    "“normalizes by itself in training”, a warning",
    "`convert_sync_batchnorm` met a subclass whose `forward` does not call `super().forward`",
    "Call it there, or accept statistics of each rank",
)
def test_class_that_normalizes_by_itself_is_named_when_it_first_trains(cls):
    layer, x = cls(3), images().float()
    expected = copy.deepcopy(layer)(x)
    model = convert_sync_batchnorm(nn.Sequential(nn.Sequential(layer)))
    model.eval()(x)
    words = rf"layer '0\.0' is a {cls.__name__} that normalizes by itself in training.*rank's alone"
    with pytest.warns(UserWarning, match=words):
        output = model.train()(x)
    assert torch.equal(output, expected)
    assert type(revert_sync_batchnorm(model)[0][0]) is cls and type(layer) is cls


@pytest.mark.parametrize("cls", [WithoutMethods, Unchecked, Square, Doubled, ByName])
def test_call_of_torchs_bound_forward_is_named_for_any_class(cls):
    layer, x = cls(3), images().float()
    bound = functools.partial(nn.BatchNorm2d.forward, layer)
    convert_sync_batchnorm(nn.Sequential(layer))
    words = "torch's forward of layer '0' was called, .* by themselves"
    with warnings.catch_warnings():  # one class's own forward warns
        warnings.simplefilter("ignore")
        layer(x)
    with pytest.warns(UserWarning, match=words):
        bound(x)
    layer._check_input_dim = lambda input: None
    with pytest.warns(UserWarning, match=words):
        bound(x)
    layer.eval()
    bound(x)


def test_parameters_are_reset_by_a_programs_replacement_in_torchs_class(monkeypatch):
    layer, called = convert_sync_batchnorm(nn.BatchNorm2d(3)), []
    monkeypatch.setattr(nn.BatchNorm2d, "reset_parameters", lambda layer: called.append(layer))
    layer.reset_parameters()
    assert called == [layer]


class OfAnother(nn.BatchNorm2d):
    """Has an attribute that torch's synchronized layer has, for something else."""

    def __init__(self, channels):
        super().__init__(channels)
        self.process_group = "mine"

    def forward(self, input):
        assert self.process_group == "mine"
        return super().forward(input)


class Grouped(nn.BatchNorm2d):
    process_group = "mine"


@pytest.mark.parametrize("cls", [OfAnother, Grouped])
def test_class_with_another_process_group_is_left_alone_and_named(cls):
    original = nn.Sequential(nn.Sequential(cls(3)), nn.BatchNorm2d(3))
    words = rf"'0\.0' is a {cls.__name__}, .* does not synchronize"
    with pytest.warns(UserWarning, match=words):
        converted = convert_sync_batchnorm(original)
    assert type(converted[0][0]) is cls and type(converted[1]) is SyncBatchNorm2d


class Frozen(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class FreezingMixin(nn.Module):
    def train(self, mode=True):
        return super().train(False)


class Mixed(nn.BatchNorm2d, FreezingMixin):
    pass


@pytest.mark.parametrize("cls", [Frozen, Mixed])
def test_other_methods_still_work(cls):
    converted = convert_sync_batchnorm(nn.Sequential(cls(3)))
    assert isinstance(converted[0], SyncBatchNorm) and not converted.train()[0].training


class Described(nn.BatchNorm2d):
    """Another constructor, another text."""

    def __init__(self, channels):
        super().__init__(channels, eps=0.5)

    def extra_repr(self):
        return "described"


class Annotated(nn.BatchNorm2d):
    scale: float
    activation = nn.ReLU
    # As Python 3.14 derives it from the annotation.
    exec("def __annotate_func__(format): return {'scale': float}")


T = TypeVar("T")


class Typed(nn.BatchNorm2d, Generic[T]):
    pass


@pytest.mark.parametrize("cls", [Described, Annotated, Typed])
def test_subclass_that_changes_nothing_of_forward_is_converted(cls):
    layer = cls(3).double()
    converted = convert_sync_batchnorm(nn.Sequential(copy.deepcopy(layer)))
    assert isinstance(converted[0], cls) and isinstance(converted[0], SyncBatchNorm)
    assert converted[0].eps == layer.eps and converted[0].extra_repr() == layer.extra_repr()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(converted(x), layer(x))
    assert type(revert_sync_batchnorm(converted)[0]) is cls
