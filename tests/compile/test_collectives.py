"""Compiled layers run the same collectives as eager ones, in the same order, also beside these."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.compiling import (
    Backend,
    Branches,
    Residual,
    Twice,
    assert_equal,
    batch,
    build,
    compiled,
    small,
    step,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import convert_sync_batchnorm


def layers_of_several_groups(rank, world_size):
    backend = Backend("aot_eager")
    model = build(small)
    model[1].process_group = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(world_size)]
    model[3].process_group = alone[rank]
    eager, fast = copy.deepcopy(model), compiled(model, backend)
    for seed in range(2):
        x = batch(rank, (4,), 6, seed)
        assert_equal(step(fast, x), step(eager, x))
    return backend.graphs


def test_layers_of_several_groups_in_one_graph(compiling_ranks):
    assert compiling_ranks.run(layers_of_several_groups) == [1, 1]


def message_sizes(profile, prefix):
    calls = [event for event in profile.events() if event.name.startswith(prefix)]
    assert all("all_reduce" in call.name for call in calls)
    calls.sort(key=lambda call: call.time_range.start)
    return [call.input_shapes[0][0] for call in calls]


def all_reduces(model, x):
    """The sizes of a step's messages, in the order in which they are sent."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
    ) as profile:
        step(model, x)
    carried = message_sizes(profile, "gloo:")
    # A graph sends a message before it waits for the previous one: two of gloo's threads then start
    # them, in either order. An eager layer waits first.
    sent = message_sizes(profile, "_c10d_functional::all_reduce") or carried
    assert sorted(sent) == sorted(carried)
    return sent


def collectives(rank, world_size, make):
    model = build(make)
    fast = compiled(model, Backend("inductor"))  # moves, merges and drops operators
    x = batch(rank, (4, 3), 5, 0).requires_grad_()
    step(fast, x)
    return all_reduces(model, x), all_reduces(fast, x)


def test_sums_of_equal_inputs_are_not_merged(compiling_ranks):
    """A compiler that merged them would leave the eager ranks waiting."""
    for eager, fast in compiling_ranks.run(collectives, Twice):
        assert eager == fast == [10, 10, 10, 10]


def test_collectives_keep_their_order_and_none_is_dropped(compiling_ranks):
    """Otherwise, if only some ranks compile, messages of different layers would be added up."""
    for eager, fast in compiling_ranks.run(collectives, Branches):
        assert eager[:4] == [10, 12, 14, 16]
        assert fast == eager


def train_mixed(rank, world_size, how):
    """Rank 0 is eager; rank 1 is compiled from the start, compiled later, or eager again."""
    backend = Backend("aot_eager")
    model = build(Residual)
    expected = copy.deepcopy(model)
    fast = model

    for seed in range(4):
        x = batch(rank, (4, 3), 5, seed)
        if rank == 1 and how == "compiled" and seed == 0:
            fast = compiled(model, backend)
        if rank == 1 and how == "compiled later" and seed == 2:
            fast = compiled(model, backend)
        if rank == 1 and how == "compiled, then eager":
            fast = compiled(model, backend) if seed < 2 else model
        assert_equal(step(fast, x), step(expected, x))
    return backend.graphs


@pytest.mark.works("only some ranks compile, or ranks compile at different times")
@pytest.mark.parametrize("how", ["compiled", "compiled later", "compiled, then eager"])
def test_ranks_may_compile_at_different_times_or_not_at_all(compiling_ranks, how):
    assert compiling_ranks.run(train_mixed, how)[1] > 0


def train_with_buckets(rank, world_size):
    """Only rank 1 compiles; DDP has three buckets, whose ends lie between layers."""
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in [(3, 192), *[(192, 192)] * 5]:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = convert_sync_batchnorm(nn.Sequential(*layers), dist.new_group())
    if rank == 1:
        model = torch.compile(model, backend="aot_eager")
    model = DistributedDataParallel(model, bucket_cap_mb=2)
    for seed in range(3):
        model(batch(rank, (2,), 4, seed).float()).square().sum().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters()]


def test_some_ranks_compile_under_ddp_with_buckets_if_layers_have_their_own_group(compiling_ranks):
    first, second = compiling_ranks.run(train_with_buckets)
    assert first == second
