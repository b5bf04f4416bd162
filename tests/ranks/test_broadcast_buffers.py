"""DistributedDataParallel without broadcasts of buffers, as docs/choosing.md recommends it."""

import inspect

import pytest
import torch
from support.cases import make_input
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import check_synchronized, convert_sync_batchnorm

# The later one is of torch 2.13, which deprecates the other.
NAMES = {"forward_sync_buffers", "broadcast_buffers"}
NAME = max(NAMES & inspect.signature(DistributedDataParallel).parameters.keys())


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=None)
    ).double()


def batch(seed, rank):
    """One image for rank 0, three for rank 1."""
    return make_input((4, 3, 5, 5), "contiguous", torch.float64, seed=seed).split([1, 3])[rank]


def train(rank, world_size, broadcasts):
    ddp = DistributedDataParallel(convert_sync_batchnorm(model()), **{NAME: broadcasts})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for seed in range(4):
        optimizer.zero_grad()
        ddp(batch(seed, rank)).square().sum().backward()
        optimizer.step()
    check_synchronized(ddp)
    return ddp.module.state_dict()


@pytest.mark.works("DistributedDataParallel without broadcasts of buffers")
def test_buffers_are_the_same_without_broadcasts(two_ranks):
    states = [*two_ranks.run(train, False), *two_ranks.run(train, True)]
    for name, expected in states[0].items():
        assert all(torch.equal(state[name], expected) for state in states), name
