"""The compared layers on a GPU: both send their messages in a group of one rank.

``syncbn`` is our layer and ``torch`` the kernels of torch.nn.SyncBatchNorm, both in an NCCL group
of one rank. Normally a single process skips the group; here both use it, without another rank.
collective_times.py measures the cost of other ranks, on several GPUs.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

import syncbn
from benchmarks.cases import Case
from benchmarks.layer import parameter_dtype
from syncbn.distributed import collectives


class TorchLayer(nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm that synchronizes in a group of one too."""

    def forward(self, input: Tensor) -> Tensor:
        """Run the training code of torch's layer for a larger group."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        buffers = (self.running_mean, self.running_var, self.eps, self.momentum)
        output: Tensor = TorchSyncBatchNorm.apply(
            input, self.weight, self.bias, *buffers, dist.group.WORLD, 1
        )
        return output


def sending_alone() -> AbstractContextManager[object]:
    """Return a context in which our layers use the group of one, too."""
    patched: AbstractContextManager[object]
    patched = mock.patch.object(collectives, "resolve_group", new=lambda _: dist.group.WORLD)
    return patched


def make_layers(case: Case, device: torch.device) -> dict[str, nn.Module]:
    """Return our layer, torch's, and a second one of ours."""
    options: dict[str, Any] = {"device": device, "dtype": parameter_dtype(case)}
    return {
        "syncbn": syncbn.SyncBatchNorm(case.shape[1], **options),
        "torch": TorchLayer(case.shape[1], **options),
        "syncbn again": syncbn.SyncBatchNorm(case.shape[1], **options),
    }
