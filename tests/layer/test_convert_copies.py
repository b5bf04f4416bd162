"""Copies and pickles of converted subclasses, and layers that their classes make."""

import copy
import functools
import os
import pickle
import subprocess
import sys

import pytest
import torch
from support.subclasses import images
from torch import nn

from syncbn import (
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    revert_sync_batchnorm,
    unfreeze_statistics,
)


class WithArguments(nn.BatchNorm2d):
    """Is constructed from arguments in its pickle."""

    def __new__(cls, channels, **_):
        return super().__new__(cls)

    def __getnewargs__(self):
        return (self.num_features,)


class WithKeywords(nn.BatchNorm2d):
    def __new__(cls, *_, channels=3):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"channels": self.num_features}


class Reduced(nn.BatchNorm2d):
    def __reduce__(self):
        return remade, (functools.partial(type(self), self.num_features),), vars(self)


def remade(make):
    return make()


class ReducedByProtocol(nn.BatchNorm2d):
    def __reduce_ex__(self, protocol):
        return copied_norm, (self.num_features, vars(self))


def copied_norm(channels, attributes):
    layer = ReducedByProtocol(channels)
    layer.__dict__.update(attributes)
    return layer


TORCHS = vars(nn.BatchNorm2d(3)).keys()


class Listing(nn.BatchNorm2d):
    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name in TORCHS}


class Replacing(nn.BatchNorm2d):
    def __setstate__(self, state):
        object.__setattr__(self, "__dict__", dict(state))


class Slotted(nn.BatchNorm2d):
    __slots__ = ("scale",)

    def __init__(self, channels):
        super().__init__(channels)
        self.scale = 2.0

    def forward(self, input):
        return super().forward(input) * self.scale

    def __getstate__(self):
        return {**vars(self), "slot": self.scale}

    def __setstate__(self, state):
        self.scale = state.pop("slot")
        super().__setstate__(state)


class CopyingItself(nn.BatchNorm2d):
    def __deepcopy__(self, memo):
        layer = CopyingItself(self.num_features)
        layer.load_state_dict(self.state_dict())
        return layer

    def __copy__(self):
        return copy.deepcopy(self)


PICKLED = [
    *(WithArguments, WithKeywords, Reduced, ReducedByProtocol, Listing, Replacing, Slotted),
    CopyingItself,
]
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle{protocol}": lambda layer, protocol=protocol: pickle.loads(
            pickle.dumps(layer, protocol)
        )
        for protocol in (0, 1, 2, 5)
    },
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("cls", PICKLED)
def test_class_with_its_own_way_to_be_copied_stays_converted(cls, way):
    model = convert_sync_batchnorm(nn.Sequential(cls(3), nn.ReLU()).double())
    fuse_activations(model)
    layer = model[0]
    freeze_statistics(layer)
    copied = COPIES[way](layer)
    assert type(copied) is type(layer) and copied is not layer
    assert copied._syncbn.identity.name == "0" and not copied.train().training
    for loaded in (copied, layer):
        unfreeze_statistics(loaded)
    x = images()
    assert torch.equal(copied(x), layer(x))
    assert layer._syncbn_takes_activation == (copied(x).min() == 0)


class NamingItsBase(nn.BatchNorm2d):
    def __init__(self, channels):
        nn.BatchNorm2d.__init__(self, channels)


class ByPosition(nn.BatchNorm2d):
    def __init__(self, channels, device=None, dtype=None):
        super().__init__(channels, 1e-5, 0.1, True, True, device, dtype)


class WithProperty(nn.BatchNorm2d):
    @property
    def activation(self):
        return "none"


@pytest.mark.parametrize("cls", [NamingItsBase, ByPosition, WithProperty, nn.BatchNorm2d])
def test_class_of_a_converted_layer_makes_layers(cls):
    layer = convert_sync_batchnorm(cls(3))
    options = {"device": torch.device("cpu")} if cls is ByPosition else {}
    made = type(layer)(3, **options)
    assert type(made) is type(layer)
    assert made._syncbn.identity is not layer._syncbn.identity
    x = images().float()
    assert torch.equal(made(x), layer(x))
    assert torch.equal(pickle.loads(pickle.dumps(made))(x), layer(x))


OTHER_PROCESS = """
import pickle, sys
layer = pickle.load(open(sys.argv[1], "rb"))
print(type(layer).__name__, [cls.__name__ for cls in type(layer).__mro__].index("Swish"))
"""

MODULE = """
from torch import nn
class Swish(nn.BatchNorm2d):
    def forward(self, input):
        return nn.functional.silu(super().forward(input))
"""


def test_pickle_loads_in_a_process_that_never_converted(tmp_path, monkeypatch):
    (tmp_path / "swish.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    from swish import Swish

    path = tmp_path / "layer.pickle"
    path.write_bytes(pickle.dumps(convert_sync_batchnorm(Swish(3))))
    output = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:" + ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == ["SyncSwish", "2"]


class Activated(nn.BatchNorm2d):
    """Has attributes under the names of ours, and needs them."""

    def __init__(self, channels, activation):
        super().__init__(channels)
        self.activation, self.negative_slope = activation, 0.5
        self.process_group = None

    def forward(self, input):
        assert self.process_group is None
        return self.activation(super().forward(input)) * self.negative_slope


@pytest.mark.parametrize("activation", [torch.tanh, nn.ReLU()])
def test_attributes_under_the_names_of_ours_come_back(activation):
    layer, x = Activated(3, activation), torch.rand(2, 3, 4, 4)
    expected, names = copy.deepcopy(layer)(x), vars(layer).keys()
    model = convert_sync_batchnorm(nn.Sequential(layer))
    torch.testing.assert_close(model(x), expected)  # float32 rounding
    revert_sync_batchnorm(model)
    assert type(layer) is Activated and vars(layer).keys() == names
    assert torch.equal(copy.deepcopy(model)(x), expected)
