"""torch's wrappers around a model on several ranks: DDP's options and FSDP2."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from support.cases import make_input
from support.ranks import Ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


class Block(nn.Module):
    def __init__(self, inputs, outputs, recompute):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.Tanh())
        self.recompute = recompute

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


def build(recompute=False, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(Block(3, 4, recompute), Block(4, 2, recompute)).to(dtype)


def batches(count):
    return [make_input((8, 3), "contiguous", torch.float64, seed=seed) for seed in range(count)]


def loss(y):
    return y.square().sum() + y[:, 0].sum()


def state(model):
    return [*(p.grad for p in model.parameters()), *model.buffers()]


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # float64 in another order


def whole_batch(count):
    """The gradients that add up over the batches, and the statistics, in one process."""
    model = build()
    for x in batches(count):
        loss(model(x)).backward()
    return state(model)


def train_shares(model, rank, world_size, count):
    """Accumulate over this rank's parts; gradients are averaged over ranks, the loss is a sum."""
    for x in batches(count):
        loss(model(x.chunk(world_size)[rank])).mul(world_size).backward()


def accumulate(rank, world_size):
    model = DistributedDataParallel(convert_sync_batchnorm(build()))
    first, last = batches(3)[:2], batches(3)[2]
    with model.no_sync():
        for x in first:
            loss(model(x.chunk(world_size)[rank])).mul(world_size).backward()
    loss(model(last.chunk(world_size)[rank])).mul(world_size).backward()
    return state(model)


@pytest.mark.works("gradient accumulation under no_sync()")
def test_gradient_accumulation_without_synchronization(any_world):
    for actual in any_world.run(accumulate):
        assert_close(actual, whole_batch(3))


def train_static(rank, world_size, recompute):
    model = convert_sync_batchnorm(build(recompute))
    model = DistributedDataParallel(model, static_graph=True)
    train_shares(model, rank, world_size, 3)
    return state(model)


@pytest.mark.works("DistributedDataParallel(static_graph=True)")
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_static_graph(two_ranks, recompute):
    for actual in two_ranks.run(train_static, recompute):
        assert_close(actual, whole_batch(3))


def fsdp(model, **options):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train_fully_sharded(rank, world_size, recompute):
    model = fsdp(convert_sync_batchnorm(build(recompute)))
    train_shares(model, rank, world_size, 3)
    return [
        tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for tensor in state(model)
    ]


@pytest.mark.works("FSDP2 (fully_shard), with and without activation checkpointing")
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_fully_sharded(two_ranks, recompute):
    for actual in two_ranks.run(train_fully_sharded, recompute):
        assert_close(actual, whole_batch(3))


def convert_sharded(rank, world_size, separately):
    """Convert and revert a model that FSDP2 has sharded; ``separately``: each layer by itself."""
    model = build()
    for block in model if separately else ():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))
        fully_shard(block.body[1], mesh=mesh)
    model = convert_sync_batchnorm(fsdp(model))
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    assert len(layers) == 2 and all(isinstance(layer, SyncBatchNorm) for layer in layers)
    train_shares(model, rank, world_size, 3)
    trained = [
        tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for tensor in state(model)
    ]
    x = batches(1)[0]
    expected = model.eval()(x)
    assert torch.equal(revert_sync_batchnorm(model)(x), expected)
    assert not any(isinstance(layer, SyncBatchNorm) for layer in layers)
    return trained


@pytest.mark.parametrize("separately", [False, True])
def test_conversion_of_a_sharded_model(two_ranks, separately):
    for actual in two_ranks.run(convert_sharded, separately):
        assert_close(actual, whole_batch(3))


def train_fully_sharded_mixed(rank, world_size, recompute):
    """Train by FSDP's policy, and by hand with the same dtypes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = convert_sync_batchnorm(build(recompute, torch.float32))
    by_hand = copy.deepcopy(model)
    for parameter in by_hand.parameters():
        parameter.data = parameter.data.bfloat16()
    sharded = fsdp(model, mp_policy=policy)
    x = batches(1)[0].chunk(world_size)[rank]
    y, expected = sharded(x.float()), by_hand(x.bfloat16())
    loss(y).backward()
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    for a, b in zip(model.buffers(), by_hand.buffers(), strict=True):
        assert a.dtype in (torch.float32, torch.int64) and torch.equal(a, b)
    return all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.works("FSDP2 with mixed precision")
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_fully_sharded_in_mixed_precision(two_ranks, recompute):
    assert two_ranks.run(train_fully_sharded_mixed, recompute) == [True, True]


def join(rank, world_size, wrap, throw, steps_before=0):
    """Rank 1 has one batch less than rank 0, after steps in which all ranks have one."""
    model = convert_sync_batchnorm(build())
    if wrap == "compiled":
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")
    model = DistributedDataParallel(model)
    for x in batches(steps_before):
        loss(model(x)).backward()
    done = 0
    with warnings.catch_warnings(), model.join(throw_on_early_termination=throw):
        warnings.simplefilter("ignore")  # torch's, that inputs are uneven
        for x in batches(3 - rank):
            loss(model(x)).backward()
            done += 1
    return done


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("wrap", ["eager", "compiled"])
def test_join_is_refused_at_once(wrap, steps_before):
    """join() is refused before the first message, which a rank without inputs would not answer."""
    with Ranks(2, case_seconds=90) as ranks:
        for outcome in ranks.outcomes(join, wrap, throw=False, steps_before=steps_before):
            assert outcome.kind == "NotImplementedError"
            assert "give such a rank empty batches instead, or call join(throw" in outcome.message


@pytest.mark.works("DistributedDataParallel.join(throw_on_early_termination=True)")
def test_join_that_ends_all_ranks_together():
    with Ranks(2) as ranks:
        first, second = ranks.outcomes(join, "eager", throw=True)
    assert "at least one rank that exhausted inputs" in first.message
    assert "Rank 1 exhausted all inputs" in second.message


def train_unevenly(rank, world_size):
    """Rank 0 has the whole of three batches; rank 1 halves of two, then empty ones."""
    model = DistributedDataParallel(convert_sync_batchnorm(build()))
    for number, x in enumerate(batches(3)):
        share = x.chunk(2)[rank] if number < 2 else (x if rank == 0 else x[:0])
        loss(model(share)).mul(world_size).backward()
    return state(model)


@pytest.mark.works("uneven inputs: empty batches in place of join()")
def test_rank_that_has_run_out_takes_empty_batches(two_ranks):
    for actual in two_ranks.run(train_unevenly):
        assert_close(actual, whole_batch(3))
