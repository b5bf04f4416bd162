"""torch's operators on the stand-in make the host wait where a GPU would."""

import pytest
import torch
from runtime_calls import take_log
from torch import nn
from torch.nn import functional
from values import DEVICE, sequence


def log_of(call):
    """Return the log of a call: pairs such as ["kernel", "aten::add.Tensor"]."""
    torch.cuda.synchronize()
    take_log()
    call()
    return [line.split(" ", 1) for line in take_log()]


def waits(call):
    return [name for kind, name in log_of(call) if kind == "wait"]


def launches(call):
    return [name for kind, name in log_of(call) if kind == "kernel"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x.clone()),
        lambda x: x.int().abs().flatten().bincount(),
        lambda x: bool((x > 0).any()),
        lambda x: x.index_put((x > 0,), x.flatten()[:1]),
        lambda x: x[torch.tensor([0, 1])],  # indices of the CPU
        lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.long, device=DEVICE), 0),
    ],
)
def test_the_host_waits_where_a_result_depends_on_values(function):
    x = sequence(4, 5)
    assert waits(lambda: function(x))


def optimize(kind, **options):
    def function(x):
        weight = nn.Parameter(x.clone())
        optimizer = kind([weight], lr=0.1, **options)
        for _ in range(2):
            weight.grad = x
            optimizer.step()

    return function


def train(x):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, device=DEVICE),
        nn.BatchNorm2d(4, device=DEVICE, track_running_stats=False),  # counters are copied there
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    output = net(x.repeat(5, 2, 2, 1).reshape(5, 2, 8, 5))
    target = torch.arange(5, device=DEVICE) % 4
    functional.cross_entropy(output, target).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def unscale(x):
    found, scale = torch.zeros(1, device=DEVICE), torch.full((1,), 2.0, device=DEVICE)
    torch._amp_foreach_non_finite_check_and_unscale_([x], found, scale)
    torch._amp_update_scale_(scale, torch.zeros(1, dtype=torch.int, device=DEVICE), found, 2, 2, 1)


def assign_where(x):
    x[x > 0] = 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.add_(1).mul(x).sum(),
        lambda x: torch.where(x.isnan() | x.isfinite(), x, 0),
        lambda x: x[torch.arange(2, device=DEVICE)],
        lambda x: x.index_put_((torch.arange(1, device=DEVICE),), x[:1]),
        lambda x: x.aminmax(),
        lambda x: x.cummax(0),
        lambda x: x.masked_fill(x > 0, 1.0),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
        lambda x: functional.multi_margin_loss(
            x.requires_grad_(), torch.zeros(4, dtype=torch.long, device=DEVICE)
        ).backward(),
        lambda x: functional.dropout(x.normal_(), 0.5).bernoulli(0.5),
        lambda x: torch.randperm(5, device=DEVICE),
        lambda x: x.abs().multinomial(2),
        lambda x: torch._foreach_norm([x, x]),
        lambda x: torch._foreach_lerp_([x], [x.clone()], 0.1),
        lambda x: x.topk(2),
        assign_where,
        unscale,
        train,
        optimize(torch.optim.SGD, momentum=0.9, foreach=True),
        optimize(torch.optim.SGD, momentum=0.9, fused=True),
        optimize(torch.optim.Adam, foreach=True),
        optimize(torch.optim.Adam, fused=True),
        optimize(torch.optim.AdamW, fused=True, capturable=True),
    ],
)
def test_the_host_does_not_wait(function):
    x = sequence(4, 5)
    assert waits(lambda: function(x)) == []


def test_an_operator_is_one_launch():
    x = sequence(4, 5)
    assert launches(lambda: x + 1) == ["aten::add.Tensor"]
    assert launches(lambda: x.view(20).t()) == []
    assert launches(lambda: torch.batch_norm_stats(x, 1e-5)) == ["aten::batch_norm_stats"]


def test_a_graph_repeats_operators():
    x = sequence(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2 + 1).double().cumsum(0)
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [7, 14, 21, 28]
