"""Ranks that learn of a failure at different passes, as over NCCL, and get in step again."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

from syncbn import SyncBatchNorm
from syncbn.distributed import alignment, failures
from syncbn.distributed.device_status import DeviceStatus
from syncbn.distributed.state import group_state

CPU = torch.device("cpu")


def step(layer):
    layer(torch.rand(4, 3).requires_grad_()).sum().backward()


def hear_late(rank, world_size, status, name, direction):
    """Set the status that an operator on CUDA would have set in an earlier pass."""
    layer, group = SyncBatchNorm(3), dist.group.WORLD
    layer._syncbn = layer._syncbn.with_name(name)
    state = group_state(group)
    record = state.record(layer._syncbn.identity, direction)
    state.statuses.of(CPU).note.fill_(status * world_size * record.fingerprint)
    with pytest.raises(RuntimeError) as error:
        failures.check_before(record)
    failures.check_before(record)  # raises it once
    del state.statuses.by_device[CPU]
    return str(error.value)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("name", "layer"), [("body.bn1", "layer 'body.bn1'"), ("", "a layer")])
@pytest.mark.parametrize(("status", "words"), [(-1, "aborted"), (1, "made another pass")])
def test_status_of_a_pass_before_names_it(two_ranks, status, words, name, layer, direction):
    for said in two_ranks.run(hear_late, status, name, direction):
        assert said.startswith(f"the {direction} pass of {layer} gave NaN: another rank")
        assert words in said


class Refusing(SyncBatchNorm):
    def _check_input_dim(self, input):
        if input.isnan().any():
            raise ValueError("own check")


def check_late(rank, world_size):
    """A program's own check fails in the pass in which all ranks learn of an earlier failure."""
    layer, group = Refusing(3), dist.group.WORLD
    layer(torch.rand(4, 3))
    record = group_state(group).record(layer._syncbn.identity, "forward")
    record.state.statuses.of(CPU).note.fill_(-world_size * record.fingerprint)
    with pytest.raises(RuntimeError, match="gave NaN"):
        layer(torch.full((4, 3), torch.nan) if rank == 0 else torch.rand(4, 3))
    del record.state.statuses.by_device[CPU]
    return layer(torch.rand(4, 3)).isfinite().all().item()


def test_earlier_failure_comes_before_a_programs_own_check(two_ranks):
    assert two_ranks.run(check_late) == [True] * 2


def stop_at_different_passes(rank, world_size, others):
    """As over NCCL: the host of rank n has started n more passes."""
    group, layer = dist.group.WORLD, SyncBatchNorm(3)
    step(layer)
    state = group_state(group)
    started = []
    for size in (10, 12, 14)[:rank]:
        state.num_passes += 1
        state.sizes_sent.append(size)
        message = torch.ones(size, dtype=torch.float64)
        started.append(dist.all_reduce(message, async_op=True))
    if others and rank == 2:  # a collective of DistributedDataParallel
        dist.all_reduce(torch.ones(1), async_op=True)
    if rank == 2:
        time.sleep(0.5)
    settled = alignment.align(state, CPU, "words" if rank == 0 else "", timedelta(seconds=20))
    if others:
        with pytest.raises(RuntimeError, match="since then the ranks .* numbers of passes: ranks"):
            layer(torch.rand(2, 3))
        return settled
    for work in started:
        work.wait()
    step(layer)
    assert layer.num_batches_tracked == 2
    return settled


def test_ranks_that_stop_at_different_passes_get_in_step_again(three_ranks):
    for cause, hindrance in three_ranks.run(stop_at_different_passes, False):
        assert (cause, hindrance) == ("rank 0: words", "")


def test_ranks_that_cannot_get_in_step_raise():
    with Ranks(3) as own:
        for _, hindrance in own.run(stop_at_different_passes, True):
            assert "that are not of SyncBatchNorm layers" in hindrance


def stop_late(rank, world_size):
    """Rank 1 does not learn of rank 0's failure while rank 0 waits."""
    group, layer = dist.group.WORLD, SyncBatchNorm(3)
    for _ in range(3):  # C++ would make the next pass
        step(layer)
    group_state(group).is_misaligned = rank == 0
    dist.barrier()
    if rank == 1:
        time.sleep(3)
        alignment.align(group_state(group), CPU)
        step(layer)
        return "", group_state(group).is_misaligned
    settled = alignment.align(group_state(group), CPU, timeout=timedelta(seconds=1))
    step(layer)  # waits for rank 1
    return settled.hindrance, group_state(group).is_misaligned


def test_rank_that_has_failed_waits_for_the_others_before_its_next_pass(two_ranks):
    expected = [("rank 1 does not know of it yet", False), ("", False)]
    assert two_ranks.run(stop_late) == expected


def test_note_of_a_pass_in_inference_mode_can_be_cleared():
    with torch.inference_mode():
        status = DeviceStatus(torch.device("cpu"), None)
    status.note[0] = 1.0
    assert status.read() == 1.0
    status.clear()
    assert status.read() == 0.0
