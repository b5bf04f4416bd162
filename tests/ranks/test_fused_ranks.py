"""A residual and an activation on several ranks, against the whole batch in float64."""

import pytest
import torch
from support.cases import assert_normalized_close, make_input, to_layout
from support.fusing import ACTIVATIONS, make_operands, run_separately
from support.groups import messages_sent
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import SyncBatchNorm, convert_sync_batchnorm, fuse_activations

# Rows of the whole batch that each rank gets, by world size; 0 is an empty rank.
SPLITS = {1: [(6,)], 2: [(3, 3), (1, 5), (0, 6)], 3: [(1, 2, 3), (0, 0, 6)]}
SHAPE = (6, 5, 3, 7)


def run_fused(rank, world_size, activation, with_residual, dtype, layout, split):
    whole = make_operands(SHAPE, "contiguous", dtype, with_residual=with_residual)
    x, dy, residual = (
        None if t is None else to_layout(t.split(split)[rank], layout)
        for t in (whole.x, whole.dy, whole.residual)
    )
    x.requires_grad_()
    layer = SyncBatchNorm(
        SHAPE[1], dtype=whole.weight.dtype, activation=activation, negative_slope=0.25
    )
    layer.weight, layer.bias = nn.Parameter(whole.weight), nn.Parameter(whole.bias)
    with messages_sent() as messages:
        y = layer(x, None if residual is None else residual.requires_grad_())
        y.backward(dy)
    # As many as without: one each way, or none in one process.
    assert [message.numel() for message in messages] == (
        [] if world_size == 1 else [2 * SHAPE[1] + 4] * 2
    )
    results = [y, x.grad, layer.weight.grad, layer.bias.grad]
    return [t.detach() for t in ([*results, residual.grad] if with_residual else results)]


def worlds():
    for world_size, splits in SPLITS.items():
        for split in splits:
            yield pytest.param(world_size, split, id=f"{world_size}-{split}")


CASES = [
    (activation, with_residual, dtype)
    for activation in ACTIVATIONS
    for with_residual in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
]


def run_all(rank, world_size, layout, split):
    return [run_fused(rank, world_size, *case, layout, split) for case in CASES]


@pytest.mark.parametrize(("world_size", "split"), [*worlds()])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_matches_the_whole_batch(world_size, split, layout, ranks):
    of_ranks = ranks(world_size).run(run_all, layout, split)
    for (activation, with_residual, dtype), *results in zip(CASES, *of_ranks, strict=True):
        whole = make_operands(SHAPE, "contiguous", dtype, with_residual=with_residual)
        exact = run_separately(whole.as_leaves(torch.float64), activation)
        for i, right in enumerate(exact):
            parts = [result[i] for result in results]
            if i in (2, 3):  # sums over each rank, together those of the whole batch
                # 126 terms of 8 roundings each.
                torch.testing.assert_close(sum(parts).double(), right, rtol=0.0, atol=126 * 1e-6)
                continue
            # A few products, and the derivative of SiLU.
            extra = 8 * torch.finfo(torch.float32).eps
            is_stored = with_residual or activation == "silu"  # the activation's gradient
            if dtype == torch.bfloat16 and i == 1 and is_stored:
                extra = 4 * torch.finfo(dtype).eps  # of its rounding
            assert_normalized_close(torch.cat(parts), right, dtype, extra)


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
