"""Recomputation under torch.utils.checkpoint updates running statistics once."""

import copy
from functools import partial

import pytest
import torch
from support.cases import make_input
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from syncbn import SyncBatchNorm


def block():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 3), SyncBatchNorm(3), nn.Tanh(), SyncBatchNorm(3, momentum=None)
    ).double()


def train(model, run, rank, steps=2):
    """Train by ``run(x)``; return results that must not depend on checkpointing."""
    gradients = []
    for seed in range(steps):
        x = make_input((6, 3), "contiguous", torch.float64, seed=10 * seed + rank)
        x.requires_grad_()
        run(x).square().sum().backward()
        gradients.append(x.grad)
    assert model[1].num_batches_tracked.item() == model[3].num_batches_tracked.item() == steps
    return [*gradients, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_trains_as_without(model, run, rank):
    plain = copy.deepcopy(model)
    expected, actual = train(plain, plain, rank), train(model, run, rank)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # float64 in another order


def checkpointed(rank, world_size, use_reentrant, nested):
    model = block()

    def inner(x):
        return checkpoint(model[2:], model[:2](x), use_reentrant=use_reentrant)

    run = inner if nested else model
    assert_trains_as_without(model, lambda x: checkpoint(run, x, use_reentrant=use_reentrant), rank)


# torch's own warning: the first run of a nested reentrant checkpoint records nothing.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.works(
    "`torch.utils.checkpoint`, reentrant or not, nested too: statistics are updated once"
)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_running_statistics_are_updated_once(any_world, use_reentrant, nested):
    any_world.run(checkpointed, use_reentrant, nested)


KEPT = {
    "linear": ["aten.addmm"],
    "linear and statistics": ["aten.addmm", "syncbn.batch_norm_stats"],
    "collectives": ["_c10d_functional.all_reduce"],
    "normalized": ["syncbn.batch_norm_apply", "syncbn.batch_norm_forward"],
    "everything": [""],
}


def policy(kept, context, operator, *args, **kwargs):
    keep = any(str(operator).startswith(name) for name in kept)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective(rank, world_size, kept, activation=None):
    model = block()
    model[1].activation = activation
    context = partial(create_selective_checkpoint_contexts, partial(policy, KEPT[kept]))
    run = partial(checkpoint, model, use_reentrant=False, context_fn=context)
    assert_trains_as_without(model, run, rank)


@pytest.mark.works("selective activation checkpointing: statistics updated once")
@pytest.mark.parametrize("kept", KEPT)
def test_selective_checkpointing(two_ranks, kept):
    two_ranks.run(selective, kept)


@pytest.mark.parametrize("kept", KEPT)
def test_selective_checkpointing_in_one_process(kept):
    selective(0, 1, kept)


@pytest.mark.parametrize("kept", ["normalized", "everything"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu"])
def test_selective_checkpointing_of_an_activation(activation, kept, two_ranks):
    """An operator whose output is kept does not overwrite values that its gradient needs."""
    two_ranks.run(selective, kept, activation)
    selective(0, 1, kept, activation)


def selective_around_compiled(rank, world_size):
    torch._dynamo.reset()
    model = block()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    run = partial(checkpoint, fast, use_reentrant=False, context_fn=context)
    assert_trains_as_without(model, run, rank)


def test_selective_checkpointing_around_a_compiled_block(two_ranks):
    two_ranks.run(selective_around_compiled)


def differentiate_twice(rank, world_size, kept, on_rank=None):
    """Return the error of a second backward pass, which torch does not allow here."""
    model = block()
    context = partial(create_selective_checkpoint_contexts, partial(policy, kept))
    x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False, context_fn=context)
    y.sum().backward(retain_graph=True)
    try:
        if on_rank in (None, rank):
            y.sum().backward()
        else:
            checkpoint(model, x, use_reentrant=False).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("operator", ["all_reduce", "wait_tensor"])
def test_torchs_error_at_a_collective_is_not_taken_for_another_ranks(operator, two_ranks):
    for rank, error in enumerate(
        two_ranks.run(differentiate_twice, [f"_c10d_functional.{operator}"])
    ):
        assert error.startswith("Trying to backward an extra time"), error
        assert error.endswith(f"[rank {rank} of 2]")


def test_torchs_error_at_a_collective_reaches_the_others(two_ranks):
    others, own = two_ranks.run(differentiate_twice, ["_c10d_functional.all_reduce"], on_rank=1)
    assert own.startswith("Trying to backward an extra time")
    assert "rank 1: RuntimeError: Trying to backward an extra time" in others


def compiled_around_checkpoint(rank, world_size, use_reentrant, backend):
    torch._dynamo.reset()
    model = block()

    @torch.compile(backend=backend, fullgraph=True)
    def run(x):
        return checkpoint(model, x, use_reentrant=use_reentrant)

    assert_trains_as_without(model, run, rank)


@pytest.mark.works("torch.compile of a checkpointed block: statistics updated once")
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_compiled_around_checkpoint(compiling_ranks, use_reentrant):
    compiling_ranks.run(compiled_around_checkpoint, use_reentrant, "aot_eager")


def checkpoint_around_compiled(rank, world_size, use_reentrant, backend):
    torch._dynamo.reset()
    model = block()
    fast = torch.compile(model, backend=backend, fullgraph=True)
    run = partial(checkpoint, fast, use_reentrant=use_reentrant)
    assert_trains_as_without(model, run, rank)


@pytest.mark.works("torch.utils.checkpoint of a compiled block: statistics updated once")
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_around_compiled(compiling_ranks, use_reentrant):
    compiling_ranks.run(checkpoint_around_compiled, use_reentrant, "aot_eager")


def test_forward_after_a_failed_backward_counts():
    layer = SyncBatchNorm(3)
    x = make_input((4, 3), "contiguous", torch.float32).requires_grad_()
    y = layer(x)
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    layer(x)
    assert layer.num_batches_tracked.item() == 2
