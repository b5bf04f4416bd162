"""Recomputation under torch.utils.checkpoint updates running statistics once."""

import pytest
import torch
from cases import make_input
from torch import nn
from torch.utils.checkpoint import checkpoint

from syncbn import SyncBatchNorm


def train_checkpointed(rank, world_size, use_reentrant, nested):
    def block():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3), nn.Tanh(), SyncBatchNorm(3))

    plain, saved = block().double(), block().double()
    x = make_input((6, 3), "contiguous", torch.float64, seed=rank)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()

    def inner(x):
        return checkpoint(saved[2:], saved[:2](x), use_reentrant=use_reentrant)

    plain(a).square().sum().backward()
    checkpoint(inner if nested else saved, b, use_reentrant=use_reentrant).square().sum().backward()
    same = [torch.equal(p, q) for p, q in zip(plain.buffers(), saved.buffers(), strict=True)]
    same += [
        torch.equal(p.grad, q.grad)
        for p, q in zip(plain.parameters(), saved.parameters(), strict=True)
    ]
    return [*same, torch.equal(a.grad, b.grad), saved[1].num_batches_tracked.item() == 1]


@pytest.mark.works(
    "`torch.utils.checkpoint`, reentrant or not, nested too: statistics are updated once"
)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_running_statistics_are_updated_once(any_world, use_reentrant, nested):
    for facts in any_world.run(train_checkpointed, use_reentrant, nested):
        assert all(facts), facts


def test_forward_after_a_failed_backward_counts():
    layer = SyncBatchNorm(3)
    x = make_input((4, 3), "contiguous", torch.float32).requires_grad_()
    y = layer(x)
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    layer(x)
    assert layer.num_batches_tracked.item() == 2
