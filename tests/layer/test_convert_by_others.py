"""Conversion with timm's and torch's converters: of their layers, and before or after them."""

import copy

import pytest
import torch
from support.cases import make_input
from torch import nn

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


@pytest.mark.works("timm's `BatchNormAct2d`")
def test_timm_layer_keeps_its_activation():
    timm_layers = pytest.importorskip("timm.layers", exc_type=ImportError)
    layer = timm_layers.BatchNormAct2d(3, act_layer=nn.SiLU)
    with torch.no_grad():
        layer.bias.fill_(-0.5)
    x = make_input((4, 3, 5, 5), "contiguous", torch.float64).float()
    expected = layer(x)
    converted = convert_sync_batchnorm(nn.Sequential(layer))
    assert isinstance(converted[0], SyncBatchNorm) and "SiLU" in str(converted)
    torch.testing.assert_close(converted(x), expected)  # float32 rounding
    assert type(revert_sync_batchnorm(converted)[0]) is timm_layers.BatchNormAct2d


@pytest.mark.works("timm's `BatchNormAct2d`")
def test_timm_layer_is_converted_after_timms_converter():
    timm_layers = pytest.importorskip("timm.layers", exc_type=ImportError)
    model = nn.Sequential(timm_layers.BatchNormAct2d(3, act_layer=nn.SiLU))
    x = make_input((4, 3, 5, 5), "contiguous", torch.float32)
    expected = copy.deepcopy(model)(x)
    converted = convert_sync_batchnorm(timm_layers.convert_sync_batchnorm(model))
    assert isinstance(converted[0], SyncBatchNorm)
    torch.testing.assert_close(converted(x), expected)  # float32 rounding
    traced = torch.fx.symbolic_trace(copy.deepcopy(converted))
    assert torch.equal(traced(x), converted(x))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0"]
    assert type(revert_sync_batchnorm(converted)[0]) is timm_layers.BatchNormAct2d


class Doubled(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("package", ["torch", "timm"])
@pytest.mark.parametrize("cls", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, Doubled])
@pytest.mark.trouble(
    "The layers are `torch.nn.SyncBatchNorm` in spite of the conversion; DDP refuses them on CPUs",
    "Another converter ran after `convert_sync_batchnorm`, often a framework's switch",
    "Switch that off, or convert again as the last one. [Frameworks](integrations.md)",
)
def test_other_converters_turn_ours_into_torchs_and_ours_turns_them_back(package, cls):
    """So ours has to be called last; docs/from_torch.md says so."""
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    if package == "timm":
        convert = pytest.importorskip("timm.layers", exc_type=ImportError).convert_sync_batchnorm
    converted = convert(convert_sync_batchnorm(nn.Sequential(cls(3))))
    assert type(converted[0]) is nn.SyncBatchNorm
    assert type(convert_sync_batchnorm(converted)[0]) is SyncBatchNorm
