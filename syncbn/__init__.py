"""Synchronized batch normalization for PyTorch: a drop-in for torch.nn.SyncBatchNorm."""

from syncbn._extension import build_info
from syncbn.convert import convert_sync_batchnorm, revert_sync_batchnorm
from syncbn.functional import sync_batch_norm
from syncbn.fusion import explain_fusion, fuse_activations
from syncbn.modules import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d

__all__ = [
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "convert_sync_batchnorm",
    "explain_fusion",
    "fuse_activations",
    "revert_sync_batchnorm",
    "sync_batch_norm",
]

__version__: str = build_info["version"]
