"""Conversion and its inverse: replaced layers, and kept state."""

import copy
import functools
import importlib.util
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from support.cases import make_input
from torch import nn

import syncbn.conversion.convert
from syncbn import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    convert_sync_batchnorm,
    freeze_statistics,
    revert_sync_batchnorm,
    unfreeze_statistics,
)


class Renamed(nn.BatchNorm2d):
    """Adds nothing to forward."""


def model():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm3d(5, affine=False)),
        nn.InstanceNorm2d(4, affine=True),
        nn.SyncBatchNorm(6, momentum=None),
        Renamed(7, eps=1e-3),
    )


@pytest.mark.works(
    "`convert_sync_batchnorm` keeps parameters, buffers, dtypes, modes and `qconfig`"
)
def test_layers_become_ours_and_keep_everything():
    original = model()
    original[1].qconfig = "a qconfig"
    original[1].eval()
    original[1].weight.requires_grad_(False)
    original[5].double()
    expected = dict(original.named_parameters()) | dict(original.named_buffers())
    flags = {name: p.requires_grad for name, p in original.named_parameters()}
    text = str(original)
    converted = convert_sync_batchnorm(original)
    assert converted is original
    kinds = [type(m).__name__ for m in converted.modules() if not list(m.children())]
    assert kinds == [
        "Conv2d",
        *["SyncBatchNorm2d", "SyncBatchNorm1d", "SyncBatchNorm3d"],
        *["InstanceNorm2d", "SyncBatchNorm", "SyncRenamed"],
    ]
    actual = dict(converted.named_parameters()) | dict(converted.named_buffers())
    assert actual.keys() == expected.keys()
    assert all(actual[name] is expected[name] for name in expected)
    assert {name: p.requires_grad for name, p in converted.named_parameters()} == flags
    assert converted[1].qconfig == "a qconfig" and not converted[1].training
    assert converted[2][1].training and not converted[2][1].affine
    assert converted[4].momentum is None and converted[5].eps == 1e-3
    assert converted[5].weight.dtype == torch.float64
    for kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
        text = text.replace(f" {kind}(", f" syncbn.Sync{kind}(")
    text = text.replace(" SyncBatchNorm(", " syncbn.SyncBatchNorm(")
    text = text.replace(" Renamed(", " SyncRenamed(")
    assert str(converted) == text


@pytest.mark.parametrize("cls", [nn.BatchNorm2d, Renamed, nn.SyncBatchNorm, SyncBatchNorm])
def test_layer_itself_stays_the_same_object(cls):
    layer = cls(3)
    state = dict(vars(layer))
    assert convert_sync_batchnorm(layer) is layer and isinstance(layer, SyncBatchNorm)
    assert revert_sync_batchnorm(layer) is layer and not isinstance(layer, SyncBatchNorm)
    assert all(vars(layer)[name] is state[name] for name in vars(layer).keys() & state.keys())


class Holding(nn.Module):
    """Runs its layers by other references than its attributes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.inside = nn.Sequential(nn.BatchNorm1d(3))
        self.listed = [self.norm]
        self.called = self.inside[0].__call__
        self.partial = functools.partial(self.norm)
        self.forwarded = self.inside[0].forward

    def forward(self, input):
        for function in (self.listed[0], self.called, self.partial, self.forwarded):
            input = function(input)
        return input


def hold(rank, world_size):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, dtype=torch.float64)[rank] + rank
    model = convert_sync_batchnorm(Holding().double())
    model(x)
    buffers = [buffer.tolist() for name, buffer in model.named_buffers() if "mean" in name]
    calls = [int(layer.num_batches_tracked) for layer in (model.norm, model.inside[0])]
    reverted = revert_sync_batchnorm(model)
    reverted(x)  # without the other rank
    own = [buffer.tolist() for name, buffer in reverted.named_buffers() if "mean" in name]
    return buffers, calls, own


def test_layers_that_a_program_also_holds_elsewhere_synchronize(two_ranks):
    (first, calls, own), (second, _, others) = two_ranks.run(hold)
    assert first == second and calls == [2, 2]
    assert own != others


def test_forward_bound_before_conversion_is_named():
    layer = nn.BatchNorm2d(3)
    bound = {"function": layer.forward}
    model = convert_sync_batchnorm(nn.Sequential(layer))
    x = torch.rand(2, 3, 4, 4)
    with pytest.warns(
        UserWarning, match="torch's forward of layer '0' was called, .* by themselves"
    ):
        bound["function"](x)
    with pytest.raises(ValueError, match="expected 4D input"):
        model.eval()[0].forward and bound["function"](x[0])


def in_half(rank, world_size, when):
    """Wrap a class's forward to compute in another dtype, as programs do."""
    original, calls = nn.BatchNorm2d.forward, []

    def wrapped(self, input):
        calls.append(self)
        return original(self, input)

    layer = nn.Sequential(nn.BatchNorm2d(3), Renamed(3))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if when == "before":
                nn.BatchNorm2d.forward = wrapped
            converted = convert_sync_batchnorm(layer)
            nn.BatchNorm2d.forward = wrapped
            torch.manual_seed(rank)
            converted(torch.randn(4, 3, 2, 2) + rank)
    finally:
        del nn.BatchNorm2d.forward
    said = [str(warning.message) for warning in caught]
    return [layer.running_mean.tolist() for layer in converted], len(calls), said


@pytest.mark.parametrize("when", ["before", "after"])
def test_forward_replaced_for_torchs_class_is_not_run_but_named(two_ranks, when):
    (first, calls, said), (second, _, _) = two_ranks.run(in_half, when)
    assert first == second and calls == 0
    assert len(said) == (when == "before")
    assert all("BatchNorm2d.forward is not torch's own" in words for words in said)


def test_method_replaced_for_torchs_class_does_not_hide_ours(monkeypatch):
    def train(layer, mode=True):
        layer.training = mode
        return layer

    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    freeze_statistics(model)
    monkeypatch.setattr(nn.BatchNorm2d, "train", train, raising=False)
    assert not model.train()[0].training


def test_attributes_of_a_program_stay_its_own():
    """Names that layers of other packages, and earlier layers of ours, have."""
    words = ("frozen", "identity", "name", "dims", "observe", "process_group", "converted_from")
    names = [f"_{word}" for word in words]
    for convert_first in (True, False):
        model = nn.Sequential(nn.BatchNorm2d(3))
        if convert_first:
            convert_sync_batchnorm(model)
        for name in names:
            setattr(model[0], name, name)
        convert_sync_batchnorm(model)
        model.train()(torch.rand(2, 3, 4, 4)).sum().backward()
        freeze_statistics(model)
        unfreeze_statistics(model)
        copied = copy.deepcopy(model)
        revert_sync_batchnorm(model)
        for either in (model, copied):
            assert all(getattr(either[0], name) == name for name in names)


def test_classmethod():
    assert type(SyncBatchNorm.convert_sync_batchnorm(model())[1]) is SyncBatchNorm2d


@pytest.mark.works("conversion of a layer that is used twice")
def test_layer_that_occurs_twice_stays_one():
    layer = nn.BatchNorm1d(3)
    converted = convert_sync_batchnorm(nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer)))
    assert converted[0] is converted[2][0]
    reverted = revert_sync_batchnorm(converted)
    assert reverted[0] is reverted[2][0] and type(reverted[0]) is nn.BatchNorm1d


@pytest.mark.works("conversion of layers with hooks")
def test_hooks_move_along_and_their_handles_remove_them():
    layer, calls = nn.BatchNorm1d(3), []
    handle = layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    converted = convert_sync_batchnorm(nn.Sequential(layer))
    x = make_input((4, 3), "contiguous", torch.float32)
    converted(x)
    assert calls == ["before", "forward"]
    handle.remove()
    converted(x)
    assert calls == ["before", "forward", "before"]


@pytest.mark.works("conversion of layers with hooks")
def test_state_dict_hooks_get_the_new_layer():
    layer, seen = nn.BatchNorm2d(3), []
    layer.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    layer.register_state_dict_post_hook(lambda module, *_: seen.append(module))
    state = layer.state_dict()
    converted = convert_sync_batchnorm(nn.Sequential(layer))[0]
    del layer
    seen.clear()
    converted.load_state_dict(state)
    converted.state_dict()
    assert len(seen) == 2 and all(module is converted for module in seen)


@pytest.fixture(params=["import first", "swap first"])
def swapped(request, monkeypatch):
    """The converters in a program that swaps torch's name for ours."""
    monkeypatch.setattr(nn, "SyncBatchNorm", SyncBatchNorm)
    if request.param == "import first":
        return syncbn.conversion.convert
    monkeypatch.setattr(syncbn.pickles, "RECONSTRUCTIONS", {**syncbn.pickles.RECONSTRUCTIONS})
    converter = staticmethod(SyncBatchNorm._syncbn_converter)
    monkeypatch.setattr(SyncBatchNorm, "_syncbn_converter", converter)  # restores it afterwards
    for name in ("syncbn.conversion.derived", "syncbn.conversion.convert"):
        spec = importlib.util.find_spec(name)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


TorchSyncBatchNorm = nn.SyncBatchNorm


def test_torchs_layers_are_known_after_a_global_swap(swapped):
    group = object()
    converted = swapped.convert_sync_batchnorm(
        nn.Sequential(TorchSyncBatchNorm(3, process_group=group), nn.SyncBatchNorm(3))
    )
    assert type(converted[0]) is type(converted[1]) is SyncBatchNorm
    assert converted[0].process_group is group
    for model in (converted, nn.Sequential(TorchSyncBatchNorm(3), nn.SyncBatchNorm(3))):
        reverted = swapped.revert_sync_batchnorm(model)
        assert type(reverted[0]) is type(reverted[1]) is swapped.BatchNorm


REBOUND = """
import functools
from torch import nn
from torch.nn.modules import batchnorm
for name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"):
    setattr(nn, name, functools.partial(getattr(nn, name), eps=1e-3))
from syncbn import SyncBatchNorm2d, convert_sync_batchnorm, revert_sync_batchnorm
model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
assert type(model[0]) is SyncBatchNorm2d and model[0].eps == 1e-3
assert type(revert_sync_batchnorm(model)[0]) is batchnorm.BatchNorm2d
"""


def test_names_of_torch_bound_to_something_else_before_the_import():
    subprocess.run([sys.executable, "-c", REBOUND], check=True)


def groups(rank, world_size):
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    ours = nn.Sequential(SyncBatchNorm(3, process_group=one), nn.BatchNorm1d(3))
    theirs = nn.Sequential(nn.SyncBatchNorm(3, process_group=one))
    layer = ours[0]
    kept = [convert_sync_batchnorm(m)[0].process_group is one for m in (ours, theirs)]
    given = [convert_sync_batchnorm(m, other)[0].process_group is other for m in (ours, theirs)]
    return [*kept, *given, ours[0] is layer, ours[1].process_group is other]


def test_synchronized_layer_keeps_its_group_unless_one_is_given(two_ranks):
    assert two_ranks.run(groups) == [[True] * 6] * 2


@pytest.mark.works("`revert_sync_batchnorm`")
@pytest.mark.filterwarnings("error")
def test_revert_gives_the_classes_back():
    original = model()
    text, state = str(original), original.state_dict()
    reverted = revert_sync_batchnorm(convert_sync_batchnorm(original))
    assert str(reverted) == text.replace(" SyncBatchNorm(", " BatchNorm(")
    assert all(torch.equal(value, reverted.state_dict()[key]) for key, value in state.items())
    assert vars(reverted[1]).keys() == vars(nn.BatchNorm2d(4)).keys()


@pytest.mark.parametrize("cls", [SyncBatchNorm, nn.SyncBatchNorm])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2), (4, 3, 2, 2, 2)])
def test_reverted_layer_takes_any_number_of_dimensions(cls, shape):
    layer = revert_sync_batchnorm(cls(3))
    x = make_input(shape, "contiguous", torch.float32)
    expected = nn.functional.batch_norm(x, None, None, training=True)
    assert torch.equal(layer(x), expected)
    with pytest.raises(ValueError, match="expected at least 2D input"):
        layer(x[0, :, None].flatten()[:1])


DIMENSIONS = {
    nn.BatchNorm1d: (SyncBatchNorm1d, {2, 3}),
    nn.BatchNorm2d: (SyncBatchNorm2d, {4}),
    nn.BatchNorm3d: (SyncBatchNorm3d, {5}),
    Renamed: (None, {4}),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", range(2, 7))
@pytest.mark.parametrize("cls", DIMENSIONS)
def test_layer_checks_dimensions_as_the_class_that_it_comes_from(cls, dims, training):
    x = make_input((4, 3, *[2] * (dims - 2)), "contiguous", torch.float64)
    built, taken = DIMENSIONS[cls]
    layer = cls(3).double().train(training)
    ours = [convert_sync_batchnorm(layer)]
    if built is not None:
        ours.append(built(3, process_group=None, dtype=torch.float64).train(training))
    for new in ours:
        if dims in taken:
            # float64, by its default tolerances
            torch.testing.assert_close(new(x), copy.deepcopy(layer)(x))
            continue
        for either in (layer, new):
            with pytest.raises(ValueError, match=rf"expected .*D.* input \(got {dims}D input\)"):
                either(x)
        assert new.num_batches_tracked == 0


def test_last_conversion_decides_the_name():
    block = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    converted = convert_sync_batchnorm(nn.Sequential(nn.ReLU(), block, copy.deepcopy(block)))
    for path in ("1.0", "2.0"):
        with pytest.raises(ValueError, match=rf"\[layer '{path}'\]"):
            converted.get_submodule(path)(torch.rand(2, 4, 5, 5))
