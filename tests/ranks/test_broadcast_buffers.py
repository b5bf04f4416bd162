"""DistributedDataParallel without broadcasts of buffers, as docs/statistics.md recommends it."""

import inspect
from unittest import mock

import pytest
import torch
from support.cases import make_input
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import check_synchronized, convert_sync_batchnorm

# torch 2.13 deprecates broadcast_buffers and adds the other.
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


def call_on_rank_0_alone(rank, world_size, trains):
    ddp = DistributedDataParallel(convert_sync_batchnorm(model()), **{NAME: False})
    ddp(batch(0, rank)).sum().backward()
    if rank == 0:
        ddp.train(trains)
        ddp(batch(1, rank))
        ddp.train()
    try:
        ddp(batch(2, rank)).sum().backward()
    except RuntimeError as error:
        return str(error)
    check_synchronized(ddp)
    return None


@pytest.mark.trouble(
    "A hang under DDP, or gloo's `Connection closed by peer` or `Timed out waiting` without a "
    "word of syncbn",
    "One rank alone called the wrapped model: to evaluate, to print a summary, or for a step more. "
    "DistributedDataParallel's broadcast of buffers met a layer's all-reduce",
    "On one rank call `model.module`, in `eval()`. Without [DDP's "
    "broadcasts](statistics.md#broadcasts-of-buffers) evaluation through the wrapper works, and an "
    "additional training pass is an error at once",
)
def test_one_rank_may_evaluate_through_the_wrapper(two_ranks):
    assert two_ranks.run(call_on_rank_0_alone, False) == [None, None]


def test_pass_of_only_one_rank_is_an_error_on_all_ranks(two_ranks):
    texts = two_ranks.run(call_on_rank_0_alone, True)
    assert all("the ranks run different passes" in text for text in texts), texts


def fail_in_the_wrapper(rank, world_size):
    ddp = DistributedDataParallel(convert_sync_batchnorm(model()))
    lost = RuntimeError("Connection closed by peer")
    with (
        mock.patch("torch.distributed.all_reduce", side_effect=lost),
        pytest.raises(RuntimeError, match="turn these broadcasts off .*Connection closed by peer"),
    ):
        ddp(batch(0, rank))


def test_error_in_the_wrapper_names_the_broadcasts(two_ranks):
    two_ranks.run(fail_in_the_wrapper)
