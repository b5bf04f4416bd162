"""The layer on several ranks against the whole batch in one process, computed in float64."""

import pytest
import torch
import torch.distributed as dist
from support.cases import assert_normalized_close, make_input, reduced_dims, to_layout
from torch import nn

import syncbn
from syncbn.ops import reference

# Rows of the whole batch that each rank gets, by world size; 0 is an empty rank.
SPLITS = {1: [(6,)], 2: [(3, 3), (1, 5), (0, 6), (6, 0)], 3: [(2, 2, 2), (1, 2, 3), (0, 0, 6)]}

LAYERS = [
    pytest.param((6, 5), "contiguous", torch.float32, id="2d"),
    pytest.param((6, 5, 3), "contiguous", torch.float64, id="3d-float64"),
    pytest.param((6, 5, 3, 7), "contiguous", torch.float32, id="4d"),
    pytest.param((6, 5, 3, 7), "channels_last", torch.float32, id="4d-channels_last"),
    pytest.param((6, 5, 3, 7), "channels_last", torch.bfloat16, id="4d-bfloat16"),
    pytest.param((6, 5, 3, 7), "contiguous", torch.float16, id="4d-float16"),
    pytest.param((6, 5, 2, 3, 4), "channels_last", torch.float32, id="5d-channels_last_3d"),
    pytest.param((6, 5, 2, 1, 3, 2), "contiguous", torch.float64, id="6d"),
]


def whole_batch(shape, dtype):
    """Input, output gradient, weight and bias of the whole batch, the same on all ranks."""
    x = make_input(shape, "contiguous", dtype)
    dy = make_input(shape, "contiguous", dtype, mean=0.1, seed=1)
    weight = torch.linspace(0.5, 1.5, shape[1], dtype=torch.float64)
    bias = torch.linspace(-1.0, 1.0, shape[1], dtype=torch.float64)
    return x, dy, weight, bias


def expected_results(shape, dtype, momentum=0.3):
    x, dy, weight, bias = whole_batch(shape, dtype)
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    y = reference.batch_norm(x, weight, bias)
    y.backward(dy.double())
    mean = momentum * x.detach().mean(reduced_dims(x))
    var = 1 - momentum + momentum * x.detach().var(reduced_dims(x))
    return y.detach(), x.grad, weight.grad, bias.grad, mean, var


def run_layer(rank, world_size, shape, layout, dtype, split, group_ranks=None):
    group = None if group_ranks is None else dist.new_group(group_ranks)
    if group_ranks is not None and rank not in group_ranks:
        return None
    position = rank if group_ranks is None else group_ranks.index(rank)
    x, dy, weight, bias = whole_batch(shape, dtype)
    x = to_layout(x.split(split)[position], layout).requires_grad_()
    dy = to_layout(dy.split(split)[position], layout)
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    layer = syncbn.SyncBatchNorm(shape[1], momentum=0.3, process_group=group, dtype=parameter_dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    y = layer(x)
    y.backward(dy)
    assert y.dtype == dtype and y.stride() == x.stride()
    return [
        t.detach()
        for t in (
            y,
            x.grad,
            layer.weight.grad,
            layer.bias.grad,
            layer.running_mean,
            layer.running_var,
            layer.num_batches_tracked,
        )
    ]


def check_results(results, shape, dtype):
    y, grad_input, grad_weight, grad_bias, mean, var = expected_results(shape, dtype)
    assert_normalized_close(torch.cat([r[0] for r in results]), y, dtype)
    assert_normalized_close(torch.cat([r[1] for r in results]), grad_input, dtype)
    # Parameter gradients are sums over each rank: together those of the whole batch. Their terms
    # are of order one and number at most 200.
    eps = 2e-5 if dtype != torch.float64 else 1e-12
    for index, expected in ((2, grad_weight), (3, grad_bias)):
        total = torch.stack([r[index].double() for r in results]).sum(0)
        torch.testing.assert_close(total, expected, rtol=eps, atol=eps)
    for r in results:
        assert torch.equal(r[4], results[0][4]) and torch.equal(r[5], results[0][5])
        eps = 1e-6 if dtype != torch.float64 else 1e-14  # float32 buffers
        torch.testing.assert_close(r[4].double(), mean, rtol=eps, atol=eps)
        torch.testing.assert_close(r[5].double(), var, rtol=eps, atol=eps)
        assert r[6].item() == 1


@pytest.mark.works("1, 2 and 3 ranks with even, uneven and empty batches, 2-D to 6-D, both layouts")
@pytest.mark.parametrize(("shape", "layout", "dtype"), LAYERS)
def test_equals_the_whole_batch(world_anywhere, shape, layout, dtype):
    for split in SPLITS[world_anywhere.world_size]:
        results = world_anywhere.run(run_layer, shape, layout, dtype, list(split))
        check_results(results, shape, dtype)


@pytest.mark.works("process groups of a subset of the ranks")
def test_groups_of_ranks_synchronize_apart(three_ranks):
    shape = (6, 5, 3)
    args = (shape, "contiguous", torch.float32, [2, 4], [0, 2])
    results = three_ranks.run(run_layer, *args)
    assert results[1] is None
    check_results([results[0], results[2]], shape, torch.float32)


def all_empty(rank, world_size, momentum):
    layer = syncbn.SyncBatchNorm(3, momentum=momentum)
    x = torch.empty(0, 3, 4, requires_grad=True)
    layer(x).sum().backward()
    return layer.state_dict(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.works("an empty batch on all ranks")
@pytest.mark.parametrize("momentum", [0.1, None])
def test_all_ranks_empty_update_nothing(world_anywhere, momentum):
    for state, grad_input, grad_weight, grad_bias in world_anywhere.run(all_empty, momentum):
        fresh = syncbn.SyncBatchNorm(3).state_dict()
        assert all(torch.equal(state[key], fresh[key]) for key in fresh)
        assert grad_input.shape == (0, 3, 4)
        assert not grad_weight.any() and not grad_bias.any()


def one_value(rank, world_size, momentum, last):
    """Return the error's message, whether the state was kept, and the mean one step later."""
    layer = syncbn.SyncBatchNorm(3, momentum=momentum)
    layer(torch.full((2, 3, 1), float(rank)))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    words = None
    try:
        layer(torch.rand(int(rank == (world_size - 1 if last else 0)), 3, 1))
    except ValueError as error:
        words = str(error)
    is_kept = all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer(torch.rand(rank + 1, 3, 1))
    return words, is_kept, layer.running_mean


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.trouble(
    "“Expected more than 1 value per channel when training”",
    "The batch of all ranks together has one value per channel",
    "`DataLoader(drop_last=True)`, larger batches, or "
    "[`freeze_statistics`](statistics.md#freeze_statistics)",
)
def test_one_value_in_the_whole_group_is_an_error_on_all_ranks(ranks, world_size, momentum, last):
    results = ranks(world_size).run(one_value, momentum, last)
    for rank, (words, is_kept, mean) in enumerate(results):
        assert words == (
            "Expected more than 1 value per channel when training, got 1 in the whole batch "
            f"[rank {rank} of {world_size}]"
        )
        assert is_kept and torch.equal(mean, results[0][2])


def evaluate_apart(rank, world_size, track):
    layer = syncbn.SyncBatchNorm(3, track_running_stats=track).eval()
    if rank == 1:
        return None  # a collective on rank 0 would wait for this rank in vain
    x = make_input((4, 3, 5), "contiguous", torch.float32)
    other = nn.BatchNorm1d(3, track_running_stats=track).eval()
    return torch.equal(layer(x), other(x))


@pytest.mark.works("evaluation on only one rank")
@pytest.mark.parametrize("track", [True, False])
def test_evaluation_never_communicates(pair_anywhere, track):
    assert pair_anywhere.run(evaluate_apart, track)[0] is True


def cumulative(rank, world_size):
    layer = syncbn.SyncBatchNorm(3, momentum=None)
    batches = [make_input((4, 3), "contiguous", torch.float32, seed=s) for s in range(3)]
    for batch in batches:
        layer(batch[2 * rank : 2 * rank + 2])
    return layer.running_mean, torch.stack([b.mean(0) for b in batches]).mean(0)


@pytest.mark.works("`momentum=None`")
def test_cumulative_average_over_ranks(pair_anywhere):
    for actual, expected in pair_anywhere.run(cumulative):
        torch.testing.assert_close(actual, expected)  # float32 rounding


def input_without_gradient(rank, world_size):
    """One rank's input needs a gradient, the other's does not; both join the backward."""
    layer = syncbn.SyncBatchNorm(3)
    x = make_input((4, 3), "contiguous", torch.float32, seed=rank).requires_grad_(rank == 0)
    layer(x).square().sum().backward()
    return x.grad is not None and torch.isfinite(x.grad).all().item()


@pytest.mark.works("input that needs a gradient on only some ranks")
def test_ranks_may_differ_in_what_needs_a_gradient(pair_anywhere):
    assert pair_anywhere.run(input_without_gradient) == [True, False]


def mixed_strides(rank, world_size):
    """Inputs and gradients of any strides, another on each rank."""
    x = make_input((4, 6, 8, 10), "contiguous", torch.float64, seed=rank)
    views = [
        x[:, ::2],
        x[..., ::2, 1::3],
        x.transpose(2, 3),
        x.permute(1, 0, 3, 2)[:4, :4],
        x[:1].expand(3, 6, 8, 10),
        x.contiguous(memory_format=torch.channels_last)[:, :3],
        x.flip(0)[:, :, 0, 0],
    ]
    errors = []
    for view in views:
        layer = syncbn.SyncBatchNorm(view.size(1), dtype=torch.float64)
        a = view.detach().requires_grad_()
        b = view.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        ya, yb = layer(a), layer(b)
        dy = torch.randn_like(ya).transpose(0, 1).contiguous().transpose(0, 1)
        ya.backward(dy)
        yb.backward(dy.contiguous())
        errors.append(max((ya - yb).abs().max().item(), (a.grad - b.grad).abs().max().item()))
    return max(errors)


@pytest.mark.works("inputs and gradients of any strides")
def test_any_strides(world_anywhere):
    assert max(world_anywhere.run(mixed_strides)) < 1e-13  # the order of double sums


def write_to_what_was_saved(rank, world_size):
    """The gradient of an input that is written to before backward, and the expected one."""
    layer = syncbn.SyncBatchNorm(3)
    x = make_input((4 + rank, 3, 5), "contiguous", torch.float32).requires_grad_()
    gradients = []
    for writes in (True, False):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            h = x * 2
            loss = layer(h).pow(3).sum()
            if writes:
                h.detach().zero_()
            gradients += torch.autograd.grad(loss, x)
    return gradients


def test_mutation_of_saved_tensors_can_be_allowed(two_ranks):
    for found, expected in two_ranks.run(write_to_what_was_saved):
        assert torch.equal(found, expected)
