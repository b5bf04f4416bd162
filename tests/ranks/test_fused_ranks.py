"""A residual and an activation on several ranks, against the whole batch in float64."""

import pytest
import torch
from support.cases import make_input
from support.groups import messages_sent
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import SyncBatchNorm, convert_sync_batchnorm, fuse_activations

SHAPE = (6, 5, 3, 7)


def fit_on_one_rank(rank, world_size, residuals):
    x = make_input((2, 3, 4), "contiguous", torch.float32)
    SyncBatchNorm(3, activation="relu")(x, residuals[rank])


@pytest.mark.parametrize("bad", [torch.zeros(2, 3, 5), torch.zeros(2, 3, 4).double(), 0.0])
def test_a_residual_that_does_not_fit_fails_all_ranks(bad, two_ranks):
    failed, waiting = two_ranks.outcomes(fit_on_one_rank, [bad, torch.zeros(2, 3, 4)])
    assert failed.kind in ("TypeError", "ValueError") and "residual" in failed.message
    assert "another rank of the process group aborted" in waiting.message


class Residual(nn.Module):
    """A block of a ResNet, whose shortcut has a layer of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(5), nn.BatchNorm2d(5), nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


def make_model():
    return nn.Sequential(Residual(), Residual(), nn.BatchNorm2d(5), nn.SiLU()).double()


def train_model(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def train_share(rank, world_size, split):
    model = fuse_activations(convert_sync_batchnorm(make_model()))
    assert [type(m).__name__ for m in model[:2]] == ["FusedResidual"] * 2
    x = make_input(SHAPE, "contiguous", torch.float64).split(split)[rank]
    with messages_sent() as messages:
        results = train_model(DistributedDataParallel(model), x)
    sizes = [message.numel() for message in messages]
    assert sizes == [2 * SHAPE[1] + 4] * 14  # as many as without: one each way for each of 7 layers
    gradients = [world_size * p.grad for p in model.parameters()]  # DDP averages
    return *results, [*gradients, *model.buffers()]


@pytest.mark.parametrize("split", [(3, 3), (1, 5), (0, 6)])
def test_fused_model_under_ddp_is_that_of_the_whole_batch(two_ranks, split):
    model = make_model()
    y, dx = train_model(model, make_input(SHAPE, "contiguous", torch.float64))
    expected = [*(p.grad for p in model.parameters()), *model.buffers()]
    shares = two_ranks.run(train_share, split)
    # float64, through seven layers that divide by deviations
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(torch.cat([share[0] for share in shares]), y, **close)
    torch.testing.assert_close(torch.cat([share[1] for share in shares]), dx, **close)
    for share in shares:
        for ours, right in zip(share[2], expected, strict=True):
            torch.testing.assert_close(ours, right, **close)


def train_unlike(rank, world_size):
    model = convert_sync_batchnorm(make_model())
    model = fuse_activations(model) if rank == 0 else model
    x = make_input(SHAPE, "contiguous", torch.float64).chunk(2)[rank]
    return train_model(model, x)


def test_ranks_that_fuse_differently_fail(two_ranks):
    """A fused layer behind a shortcut runs later."""
    outcomes = two_ranks.outcomes(train_unlike)
    assert [outcome.kind for outcome in outcomes] == ["RuntimeError"] * 2
    assert any("0.bn2" in outcome.message for outcome in outcomes)
