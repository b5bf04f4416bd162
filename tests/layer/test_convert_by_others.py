"""Conversion of timm's layers, and before or after timm's and torch's converters."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.cases import make_input
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def test_torchs_layer_refuses_cpus_and_ours_trains():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
            model(torch.ones(4, 2))
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            DistributedDataParallel(model)(torch.ones(4, 2))
        DistributedDataParallel(convert_sync_batchnorm(model))(torch.ones(4, 2))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("package", ["torch", "timm"])
@pytest.mark.parametrize("cls", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, Doubled])
@pytest.mark.trouble(
    "“SyncBatchNorm layers only work with GPU modules” or “SyncBatchNorm expected input tensor to "
    "be on GPU”",
    "The layers are `torch.nn.SyncBatchNorm`, which does not train on CPUs: syncbn has not "
    "converted them, or another converter ran later, often a framework's switch",
    "Call syncbn's `convert_sync_batchnorm` as the last one. [Frameworks](integrations.md)",
)
def test_other_converters_turn_ours_into_torchs_and_ours_turns_them_back(package, cls):
    """So ours has to be called last; docs/from_torch.md says so."""
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    if package == "timm":
        convert = pytest.importorskip("timm.layers", exc_type=ImportError).convert_sync_batchnorm
    converted = convert(convert_sync_batchnorm(nn.Sequential(cls(3))))
    assert type(converted[0]) is nn.SyncBatchNorm
    assert type(convert_sync_batchnorm(converted)[0]) is SyncBatchNorm
