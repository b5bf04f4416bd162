"""torchft's process group, which continues with other ranks after a failure."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

from syncbn import SyncBatchNorm


def train_and_lose_a_rank(rank, world_size):
    from torchft.process_group import ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = [store.port]
    dist.broadcast_object_list(port, src=0)
    group = ProcessGroupGloo(timeout=timedelta(seconds=10))
    layer = SyncBatchNorm(3, momentum=1.0, process_group=group)
    batches = [torch.arange(12.0).view(4, 3) + other for other in range(world_size)]

    def train(number, members):
        group.configure(f"localhost:{port[0]}/{number}", f"replica {rank}", rank, members)
        for _ in range(2):
            layer(batches[rank]).sum().backward()
        assert torch.equal(layer.running_mean, torch.cat(batches[:members]).mean(0))

    train(0, world_size)
    if rank == world_size - 1:
        os._exit(3)
    with pytest.raises(RuntimeError, match="forward all-reduce of a SyncBatchNorm layer failed"):
        layer(batches[rank])
    train(1, world_size - 1)
    return True


def test_group_is_configured_again_without_a_lost_rank():
    with Ranks(3) as ranks:
        *survivors, lost = ranks.outcomes(train_and_lose_a_rank)
    assert lost.message == "exit code 3"
    assert survivors == [True] * 2
