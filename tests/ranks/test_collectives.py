"""Collectives of a layer: their number and size, and messages about failures of other ranks."""

import os
import subprocess
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import make_input
from support.groups import make_by_hand, messages_sent
from support.ranks import Failure, Ranks
from torch.utils.flop_counter import FlopCounterMode

from syncbn import SyncBatchNorm
from syncbn.ops import tensors

CPU = torch.profiler.ProfilerActivity.CPU


class Count:
    """Records each call of a collective of torch.distributed."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        self.profile = torch.profiler.profile(activities=[CPU], record_shapes=True, acc_events=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *exception):
        self.profile.__exit__(*exception)
        for event in self.profile.events():
            if event.name.startswith("c10d::") and not event.name.endswith("_"):
                raise AssertionError(f"a collective this test does not know: {event.name}")
            if event.name.startswith("c10d::"):
                self.calls.append(event.name)


def count_calls(rank, world_size, shape, training=True):
    layer = SyncBatchNorm(shape[1]).train(training)
    x = make_input(shape, "contiguous", torch.bfloat16, seed=rank).requires_grad_()
    with messages_sent() as messages:
        with Count() as forward:
            y = layer(x)
        with Count() as backward:
            y.sum().backward()
    return forward.calls, backward.calls, [(m.numel(), m.dtype) for m in messages]


@pytest.mark.parametrize("shape", [(2, 3), (5, 3, 8, 9), (0, 3, 4, 4), (4, 300, 2, 2)])
def test_one_all_reduce_each_way_of_a_size_that_depends_on_channels_alone(any_world, shape):
    channels = shape[1]
    for forward, backward, sizes in any_world.run(count_calls, shape):
        if any_world.world_size == 1:
            assert (forward, backward, sizes) == ([], [], [])
        else:
            assert forward == ["c10d::allreduce_"] and backward == ["c10d::allreduce_"]
            double = torch.float64
            assert sizes == [(2 * channels + 4, double)] * 2


def test_evaluation_sends_nothing(two_ranks):
    assert two_ranks.run(count_calls, (4, 3, 5), training=False) == [([], [], [])] * 2


def count_create_graph(rank, world_size):
    x = make_input((4, 3), "contiguous", torch.float64, seed=rank).requires_grad_()
    y = SyncBatchNorm(3).double()(x)
    with Count() as backward:
        torch.autograd.grad(y.sum(), x, create_graph=True)
    return backward.calls


def test_backward_under_create_graph_takes_three(two_ranks):
    assert two_ranks.run(count_create_graph) == [["c10d::allreduce_"] * 3] * 2


def labels_of_a_step(rank, world_size):
    """Return the labels of a step's collectives in a profile."""
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    with torch.profiler.profile(activities=[CPU], acc_events=True) as profile:
        layer(torch.rand(4, 3)).sum().backward()
    return [event.name for event in profile.events() if event.name.startswith("syncbn ")]


def test_collectives_have_labels_in_a_profile(two_ranks):
    labels = ["syncbn forward body.bn1", "syncbn backward body.bn1"]
    assert two_ranks.run(labels_of_a_step) == [labels] * 2


def count_flops_in_a_group_by_hand(rank, world_size, path):
    layer = SyncBatchNorm(3, process_group=make_by_hand(path, rank, world_size))
    with FlopCounterMode(display=False):
        layer(torch.full((4, 3), float(rank)))
    return layer.running_mean.tolist()


def test_dispatch_modes_take_groups_without_a_name(two_ranks, tmp_path):
    for mean in two_ranks.run(count_flops_in_a_group_by_hand, str(tmp_path / "store")):
        assert mean == pytest.approx([0.05] * 3)  # 0.1 times the mean of 0 and 1


def train(rank, world_size, channels, name="body.bn1"):
    layer = SyncBatchNorm(channels[rank])
    layer._syncbn = layer._syncbn.with_name(name)
    layer(torch.rand(4, channels[rank]))


@pytest.mark.trouble(
    "“expected the same channels on all ranks”",
    "The ranks have layers of different sizes, or run them in another order",
    "Build and run the same layers in the same order on all ranks",
)
def test_ranks_with_different_channels_all_fail_with_words(three_ranks):
    """Without the comparison, gloo would end one of the processes by SIGABRT."""
    outcomes = three_ranks.outcomes(train, [4, 8, 4])
    kinds = sorted(outcome.kind for outcome in outcomes)
    assert kinds in (
        ["RuntimeError", "RuntimeError", "ValueError"],
        ["RuntimeError"] + 2 * ["ValueError"],
    )
    for rank, outcome in enumerate(outcomes):
        assert f"[layer 'body.bn1', rank {rank} of 3]" in outcome.message
        if outcome.kind == "ValueError":
            assert "expected the same channels on all ranks" in outcome.message
            assert "while another normalizes" in outcome.message


def leave_before(rank, world_size, direction):
    layer = SyncBatchNorm(3)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    x = torch.rand(4, 3, requires_grad=True)
    y = layer(x).sum()
    if rank == 1:
        os._exit(3)
    if direction == "forward":
        layer(x)
    torch.autograd.grad(y, x, create_graph=direction == "double backward")


@pytest.mark.parametrize("direction", ["forward", "backward", "double backward"])
@pytest.mark.trouble(
    "“all-reduce of a SyncBatchNorm layer failed”",
    "Another rank ended, failed or did not come in time",
    "Read the first error of the other ranks; restart from a checkpoint, or [continue in "
    "a new group](failures.md#continue-in-a-new-group)",
)
def test_rank_that_dies_fails_the_others_at_once_with_words(direction):
    with Ranks(2, case_seconds=30) as ranks:
        survivor, dead = ranks.outcomes(leave_before, direction)
    assert dead.message == "exit code 3"
    assert isinstance(survivor, Failure) and survivor.kind == "RuntimeError"
    assert f"the {direction} all-reduce of a SyncBatchNorm layer failed" in survivor.message
    assert "[layer 'body.bn1', rank 0 of 2]" in survivor.message
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in survivor.message


def stay_away(rank, world_size):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    layer = SyncBatchNorm(3, process_group=group)
    layer._syncbn = layer._syncbn.with_name("body.bn1")
    if rank == 0:
        layer(torch.rand(4, 3))


def test_rank_that_does_not_come_fails_the_others_at_the_groups_timeout():
    with Ranks(2, case_seconds=30) as ranks:
        waiting, _ = ranks.outcomes(stay_away)
    assert waiting.kind == "RuntimeError"
    assert "did not come in time" in waiting.message
    assert "[layer 'body.bn1', rank 0 of 2]" in waiting.message


def interrupt_before_the_sum(rank, world_size):
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        store.wait(["interrupted"], timedelta(seconds=60))  # less than the collective's
        return
    with (
        mock.patch.object(tensors, "as_dense", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        SyncBatchNorm(3)(torch.rand(3, 4).t())
    store.set("interrupted", "")


def test_interrupt_does_not_wait_for_other_ranks():
    with Ranks(2, case_seconds=100, collective_seconds=90) as ranks:
        ranks.run(interrupt_before_the_sum)


def send_then_train(rank, world_size):
    """A send counts only on the ranks that take part in it."""
    if rank == 0:
        dist.send(torch.ones(1), 1)
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    for channels in (4, 8, 16):
        SyncBatchNorm(channels)(torch.rand(3, channels))
    return True


def test_sends_between_some_ranks_cause_no_disagreement():
    with Ranks(3) as ranks:
        assert ranks.run(send_then_train) == [True] * 3


FAKE_WORLD = """
import tracemalloc
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from syncbn import SyncBatchNorm

sizes = []
original = dist.all_reduce
dist.all_reduce = lambda message, **options: (sizes.append(message.numel()), original(message))
dist.init_process_group("fake", rank=0, world_size=4096, store=FakeStore())
layers = torch.nn.Sequential(SyncBatchNorm(3), torch.nn.Linear(3, 5), SyncBatchNorm(5))
x = torch.rand(4, 3, requires_grad=True)

def step():
    layers(x).sum().backward()

step()
step()
tracemalloc.start()
before = tracemalloc.get_traced_memory()[0]
for _ in range(200):
    sizes.clear()
    step()
print(sizes, tracemalloc.get_traced_memory()[0] - before < 200 * 1024)
"""


REPLACED = """
import torch, torch.distributed as dist
sizes, original = [], dist.all_reduce
dist.all_reduce = lambda message, **options: (sizes.append(message.numel()), original(message))
from syncbn import SyncBatchNorm
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
SyncBatchNorm(3)(torch.rand(4, 3)).sum().backward()
print(sizes)
"""


def test_function_of_a_program_is_called_in_the_place_of_torchs():
    """Also if the program has replaced it before it imports syncbn."""
    result = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True)
    assert result.stdout == "[10, 10]\n", result.stderr


def test_large_world_sends_and_keeps_as_little_as_a_small_one():
    """On torch's fake backend, which dry runs use: it adds nothing up and counts no operations.

    A value for each rank would be 32 KiB a step; torch itself keeps less than 1 KiB.
    """
    result = subprocess.run([sys.executable, "-c", FAKE_WORLD], capture_output=True, text=True)
    assert result.stdout.strip() == "[10, 14, 14, 10] True", result.stderr


DRY_RUN = """
import torch, torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from syncbn import SyncBatchNorm

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
with FakeTensorMode():
    layer = SyncBatchNorm(3)
    layer(torch.rand(4, 3)).sum().backward()  # the input needs no gradient
    x = torch.rand(4, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    print(list(x.grad.shape))
"""


def test_dry_run_of_tensors_without_values():
    result = subprocess.run([sys.executable, "-c", DRY_RUN], capture_output=True, text=True)
    assert result.stdout.strip() == "[4, 3]", result.stderr
