"""A program that uses every public name, as type checkers see them: mypy reads it."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import assert_type

import syncbn
from syncbn import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    check_synchronized,
    convert_sync_batchnorm,
    explain_fusion,
    freeze_statistics,
    fuse_activations,
    recompute_statistics,
    revert_sync_batchnorm,
    sync_batch_norm,
    unfreeze_statistics,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)


def models(block: Block, module: nn.Module) -> None:
    assert_type(convert_sync_batchnorm(block), Block)
    assert_type(convert_sync_batchnorm(block, process_group=None).bn, nn.BatchNorm2d)
    assert_type(convert_sync_batchnorm(module), nn.Module)
    assert_type(SyncBatchNorm.convert_sync_batchnorm(block, None), Block)
    assert_type(SyncBatchNorm.convert_sync_batchnorm(module), nn.Module)
    assert_type(revert_sync_batchnorm(block).bn, nn.BatchNorm2d)
    assert_type(revert_sync_batchnorm(module), nn.Module)


def layers(ordinary: nn.BatchNorm2d, torchs: nn.SyncBatchNorm, ours: SyncBatchNorm) -> None:
    assert_type(convert_sync_batchnorm(ordinary), _BatchNorm)
    assert_type(convert_sync_batchnorm(torchs), _BatchNorm)
    assert_type(convert_sync_batchnorm(ours), _BatchNorm)
    assert_type(SyncBatchNorm.convert_sync_batchnorm(ordinary), _BatchNorm)
    assert_type(revert_sync_batchnorm(torchs), _BatchNorm)
    assert_type(revert_sync_batchnorm(ours), _BatchNorm)


class Doubled(SyncBatchNorm2d):
    def forward(
        self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return 2 * super().forward(input, residual, mask)


def constructors(group: ProcessGroup | None, mesh: DeviceMesh) -> None:
    layer = SyncBatchNorm(
        3, 1e-3, None, True, False, group, "cpu", torch.float64, bias=False, activation="silu"
    )
    layer.process_group = mesh
    assert_type(layer.process_group, ProcessGroup | None)
    assert_type(layer.activation, str | None)
    assert_type(layer.negative_slope, float)
    for cls in (SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d, Doubled):
        x = torch.rand(2, 3)
        layer = cls(3, process_group=mesh, negative_slope=0.2)
        assert_type(layer.forward(x, x, mask=x > 0), Tensor)


def functions(x: Tensor, block: Block, group: ProcessGroup) -> None:
    y = sync_batch_norm(
        x,
        None,
        None,
        x,
        x,
        True,
        0.1,
        1e-5,
        group,
        residual=x,
        activation="leaky_relu",
        negative_slope=0.1,
        mask=x > 0,
    )
    assert_type(y, Tensor)
    assert_type(convert_sync_batchnorm(block, group_size="node"), Block)
    assert_type(fuse_activations(block), Block)
    report = explain_fusion(block)
    for fused in report.fused:
        assert_type((fused.name, fused.activation, fused.residual), tuple[str, str, bool])
    for left in report.left:
        assert_type(left.name + left.reason, str)
    freeze_statistics(block, affine=True)
    unfreeze_statistics(block)
    check_synchronized(block)
    recompute_statistics(block, [x])
    recompute_statistics(block, [(x, 1)], forward=lambda model, batch: model(batch[0]))
    assert_type(syncbn.__version__, str)
