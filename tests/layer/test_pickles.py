"""Pickles of whole models: earlier versions' load, and none holds a private path."""

import io
import pickle
import pickletools
import zipfile

import pytest
import torch
from support.pickled import DATA, KINDS, Residual, write
from torch import nn

import syncbn
from syncbn import SyncBatchNorm, unfreeze_statistics

FILES = sorted(DATA.glob("*.pt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_saved_model_loads_and_computes_the_same(path):
    saved = torch.load(path, weights_only=False)
    model = saved["model"]
    torch.testing.assert_close(model.eval()(saved["input"]), saved["output"])  # float32 rounding
    model.train()(saved["input"])
    if path.stem != "frozen":
        layers = [
            layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        ]
        assert layers[0].num_batches_tracked == 2


def test_saved_layers_keep_their_state():
    models = {path.stem: torch.load(path, weights_only=False)["model"] for path in FILES}
    assert models["converted"][0]._syncbn.identity.name == "0"
    (frozen,) = models["frozen"].train()
    assert not frozen.training and not frozen.weight.requires_grad
    unfreeze_statistics(frozen)
    assert frozen.training and frozen.weight.requires_grad
    assert models["derived"][0](torch.ones(1, 2, 2, 2)).shape == (1, 2, 2, 2)
    assert not isinstance(models["reverted"][0], SyncBatchNorm)
    assert models["reverted"][0].negative_slope == 0.2


def strings(code):
    """Return all strings in a pickle, by which it names classes and functions too."""
    return [value for _, value, _ in pickletools.genops(code) if isinstance(value, str)]


def private_paths(code):
    return [text for text in strings(code) if "syncbn." in text]


def globals_of(path):
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        code = archive.read(name)
    assert not private_paths(code)
    return {text for text in strings(code) if text.startswith("syncbn ")}


PUBLIC = {f"syncbn {name}" for name in (*syncbn.__all__, "_reconstruct")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_saved_models_name_only_syncbn(path):
    assert globals_of(path) <= PUBLIC


@pytest.mark.parametrize("kind", KINDS)
def test_new_pickles_name_the_same_objects_as_saved_ones(kind, tmp_path):
    write(kind, tmp_path / "new.pt")
    assert globals_of(tmp_path / "new.pt") == globals_of(DATA / f"{kind}.pt") != set()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_pickles_of_any_protocol_name_no_private_path(kind, protocol):
    code = pickle.dumps(KINDS[kind](), protocol)
    assert not private_paths(code)
    pickle.loads(code)


def test_timms_layer_names_no_private_path():
    timm_layers = pytest.importorskip("timm.layers", exc_type=ImportError)
    layer = syncbn.convert_sync_batchnorm(timm_layers.BatchNormAct2d(3, act_layer=nn.SiLU))
    code = pickle.dumps(layer)
    assert not private_paths(code)
    x = torch.rand(2, 3, 4, 4)
    loaded = pickle.loads(code)
    assert type(loaded) is type(layer)
    torch.testing.assert_close(loaded(x), layer(x))  # float32 rounding


class Reduced(Residual):
    def __reduce__(self):
        return type(self), (), vars(self)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_fused_module_with_its_own_way_to_be_pickled(protocol):
    model = syncbn.fuse_activations(syncbn.convert_sync_batchnorm(nn.Sequential(Reduced())))
    loaded, x = pickle.loads(pickle.dumps(model, protocol)), torch.rand(3, 2, 2, 2)
    assert type(loaded[0]).__name__ == type(model[0]).__name__ == "FusedReduced"
    assert torch.equal(loaded(x), model(x))
    assert type(syncbn.revert_sync_batchnorm(loaded)[0]) is Reduced


def test_kind_of_a_later_version_is_an_error():
    stream = io.BytesIO(b"csyncbn\n_reconstruct\n(V%s\ntR." % b"later")
    with pytest.raises(ValueError, match="cannot load an object of kind 'later'"):
        pickle.load(stream)


@pytest.mark.parametrize("name", syncbn.__all__)
def test_public_names_are_in_the_package(name):
    value = getattr(syncbn, name)
    assert value.__module__ == "syncbn" and pickle.loads(pickle.dumps(value)) is value
    assert f"syncbn.{name}" in repr(value) or repr(value).startswith(f"<function {name} at")
