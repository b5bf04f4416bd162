"""Synchronized batch normalization for PyTorch: a drop-in for torch.nn.SyncBatchNorm.

    A model's layers    convert_sync_batchnorm, revert_sync_batchnorm
    New layers          SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
    The function        sync_batch_norm
    Activations         fuse_activations, explain_fusion
    Statistics          recompute_statistics, freeze_statistics, unfreeze_statistics
    Ranks               check_synchronized

Help for one name: help(syncbn.convert_sync_batchnorm). Commands: python -m syncbn --help.
"""

from pkgutil import extend_path

# In a clone the compiled operators are those of the installed package.
__path__ = extend_path(__path__, __name__)

# First: its errors tell why syncbn cannot run here.
from syncbn.ops._extension import build_info  # isort: skip
from syncbn.conversion.convert import convert_sync_batchnorm, revert_sync_batchnorm
from syncbn.functional import sync_batch_norm
from syncbn.fusion.fuse import explain_fusion, fuse_activations
from syncbn.modules import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
)
from syncbn.pickles import _reconstruct  # noqa: F401  # pickles name it
from syncbn.utils.consistency import check_synchronized
from syncbn.utils.freeze import freeze_statistics, unfreeze_statistics
from syncbn.utils.precise_bn import recompute_statistics

__all__ = [
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "check_synchronized",
    "convert_sync_batchnorm",
    "explain_fusion",
    "freeze_statistics",
    "fuse_activations",
    "recompute_statistics",
    "revert_sync_batchnorm",
    "sync_batch_norm",
    "unfreeze_statistics",
]

# The path of each public name in texts and pickles, which must not depend on our files.
for _name in __all__:
    globals()[_name].__module__ = "syncbn"

__version__: str = build_info["version"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
