"""The converters of torch, timm and others, which make torch's layers of ours."""

import copy
import warnings

import pytest
from torch import nn

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


def converter_of(package):
    if package == "torch":
        return nn.SyncBatchNorm.convert_sync_batchnorm
    return pytest.importorskip("timm.layers", exc_type=ImportError).convert_sync_batchnorm


@pytest.mark.works(
    "a warning if a converter of torch, Lightning, timm or MMEngine replaces our layers"
)
@pytest.mark.parametrize("package", ["torch", "timm"])
def test_other_converters_turn_ours_into_torchs_with_one_warning_at_the_call(package):
    """So ours has to be called last; the README says so."""
    convert = converter_of(package)
    ours = nn.Sequential(SyncBatchNorm(3), nn.Sequential(nn.ReLU(), SyncBatchNorm(3)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        converted = convert(ours)
    assert type(converted[0]) is type(converted[1][1]) is nn.SyncBatchNorm
    (warning,) = caught
    assert "replaces syncbn's layers by torch.nn.SyncBatchNorm" in str(warning.message)
    assert warning.filename == __file__
    assert type(convert_sync_batchnorm(converted)[0]) is SyncBatchNorm


class Doubled(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("package", ["torch", "timm"])
@pytest.mark.parametrize("cls", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, Doubled])
def test_other_converters_warn_of_layers_that_kept_their_class(package, cls):
    ours = convert_sync_batchnorm(nn.Sequential(cls(3)))
    with pytest.warns(UserWarning, match="replaces syncbn's layers by torch.nn.SyncBatchNorm"):
        assert type(converter_of(package)(ours)[0]) is nn.SyncBatchNorm


@pytest.mark.parametrize("package", ["torch", "timm"])
def test_other_converters_do_not_warn_after_revert(package):
    reverted = revert_sync_batchnorm(convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4))))
    assert type(converter_of(package)(reverted)[0]) is nn.SyncBatchNorm


def test_qconfig_is_an_attribute_like_any_other():
    layer = SyncBatchNorm(3)
    assert not hasattr(layer, "qconfig") and not hasattr(SyncBatchNorm, "qconfig")
    with pytest.raises(AttributeError, match="'SyncBatchNorm' object has no attribute 'qconfig'"):
        layer.qconfig  # noqa: B018
    layer.qconfig = "a qconfig"
    assert copy.deepcopy(layer).qconfig == "a qconfig"
    del layer.qconfig
    assert not hasattr(layer, "qconfig")
