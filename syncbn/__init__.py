"""Synchronized batch normalization for PyTorch: a drop-in for torch.nn.SyncBatchNorm."""

from syncbn._extension import build_info
from syncbn.convert import convert_sync_batchnorm, revert_sync_batchnorm
from syncbn.functional import sync_batch_norm
from syncbn.fusion import explain_fusion, fuse_activations
from syncbn.modules import SyncBatchNorm

__all__ = [
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "explain_fusion",
    "fuse_activations",
    "revert_sync_batchnorm",
    "sync_batch_norm",
]

__version__: str = build_info["version"]
