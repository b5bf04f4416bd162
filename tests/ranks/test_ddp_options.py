"""What docs/choosing.md says of DistributedDataParallel: accumulation, broadcasts of buffers."""

import contextlib

import pytest
import torch
from cases import make_input
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import check_synchronized, convert_sync_batchnorm


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=None)
    ).double()


def batch(seed, rank=None):
    """A batch for the ranks, of one image for rank 0 and three for rank 1; or one's share."""
    whole = make_input((4, 3, 5, 5), "contiguous", torch.float64, seed=seed)
    return whole if rank is None else whole.split([1, 3])[rank]


def train(rank, world_size, broadcast_buffers):
    ddp = DistributedDataParallel(
        convert_sync_batchnorm(model()), broadcast_buffers=broadcast_buffers
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for seed in range(4):
        optimizer.zero_grad()
        ddp(batch(seed, rank)).square().sum().backward()
        optimizer.step()
    check_synchronized(ddp)
    return ddp.module.state_dict()


@pytest.mark.works("DistributedDataParallel(broadcast_buffers=False)")
def test_buffers_are_the_same_without_broadcasts(two_ranks):
    states = [*two_ranks.run(train, False), *two_ranks.run(train, True)]
    for name, expected in states[0].items():
        assert all(torch.equal(state[name], expected) for state in states), name


def accumulate(rank, world_size):
    ddp = DistributedDataParallel(convert_sync_batchnorm(model()))
    for seed in range(3):
        with ddp.no_sync() if seed < 2 else contextlib.nullcontext():
            ddp(batch(seed, rank)).square().sum().backward()
    gradients = [parameter.grad for parameter in ddp.parameters()]
    return gradients, list(ddp.module.buffers())


@pytest.mark.works("gradient accumulation: `no_sync()`")
def test_accumulation_normalizes_each_small_batch_by_its_own(two_ranks):
    expected = model()
    for seed in range(3):
        expected(batch(seed)).square().sum().backward()
    for gradients, buffers in two_ranks.run(accumulate):
        for own, parameter in zip(gradients, expected.parameters(), strict=True):
            # DDP averages over two ranks; float64, sums of some hundred terms that may cancel
            torch.testing.assert_close(2 * own, parameter.grad, rtol=1e-7, atol=1e-10)
        for own, buffer in zip(buffers, expected.buffers(), strict=True):
            # float64, by its default tolerances
            torch.testing.assert_close(own, buffer)
        assert buffers[2] == 3
    at_once = model()
    at_once(torch.cat([batch(seed) for seed in range(3)]))
    assert not torch.allclose(buffers[0], at_once[1].running_mean)
