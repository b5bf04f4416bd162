"""How ranks agree on their passes: when they compare them, and messages on others' passes."""

import itertools
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ops
from support.groups import messages_sent
from support.ranks import Ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from syncbn import SyncBatchNorm, sync_batch_norm
from syncbn.distributed import state as states
from syncbn.distributed.layer_id import Identity, digest
from syncbn.distributed.state import group_state
from syncbn.distributed.sums import verify


def step(*layers):
    """One training step through layers of any number of channels."""
    total = sum(layer(torch.rand(4, layer.num_features).requires_grad_()).sum() for layer in layers)
    total.backward()


def change_together(rank, world_size, late):
    a, b, c = SyncBatchNorm(3), SyncBatchNorm(4), SyncBatchNorm(5)
    sent = []
    for layers in [(a, b), (a, b), (a, c), (a, c), (a, b), (a, c)]:
        is_late = late and rank == 1 and len(sent) == 2  # before the first c
        with messages_sent() as messages:
            step(layers[0], *([Late()] if is_late else []), layers[1])
        sent.append([message.numel() for message in messages])
    return sent


class Late(nn.Module):
    """Comes after the other ranks have stopped waiting."""

    num_features = 1

    def forward(self, x):
        time.sleep(3)  # a FileStore counts in whole seconds
        return x


@pytest.mark.parametrize("late", [False, True])
def test_ranks_that_change_together_agree_once(two_ranks, late):
    """Late ranks agree in a message of the expected size: 12 instead of 14 values."""
    with_b, with_c = [10, 12, 12, 10], [10, 14, 14, 10]
    first = [10, 12, *with_c[1:]] if late else with_c
    for sent in two_ranks.run(change_together, late):
        assert sent == [with_b, with_b, first, with_c, with_b, with_c]


class Subclass(torch.Tensor):
    """Like MONAI's and fastai's tensors."""


def part_with_a_subclass(rank, world_size, backward):
    a, b = SyncBatchNorm(3), SyncBatchNorm(5)

    def run(layer):
        x = torch.rand(4, layer.num_features, requires_grad=True)
        y = layer(x.as_subclass(Subclass))
        return y.backward if backward else lambda dy: None

    for layer in (a, b) * 3:
        run(layer)(torch.ones(4, layer.num_features).as_subclass(Subclass))
    layer = (a, b)[rank]
    if backward:
        last = [run(a), run(b)][rank]
    else:
        run(a)
    with pytest.raises(ValueError, match="expected the same channels on all ranks"):
        if backward:
            last(torch.ones(4, layer.num_features).as_subclass(Subclass))
        else:
            run(layer)


@pytest.mark.parametrize("backward", [False, True])
def test_ranks_part_with_inputs_of_a_tensor_subclass(backward, two_ranks):
    """All ranks raise, as with plain tensors; gloo does not end a process."""
    two_ranks.run(part_with_a_subclass, backward)


def expect_different_sizes(rank, world_size):
    """Rank 1 has run other steps with the layer before, unknown to the others."""
    group, layer, other = dist.group.WORLD, SyncBatchNorm(3), SyncBatchNorm(4)
    state = group_state(group)
    state.record(layer._syncbn.identity, "forward").add_size(10 + 2 * rank)
    with messages_sent() as messages:
        layer(torch.rand(2, 3))
        other(torch.rand(2, 4))
    return [message.numel() for message in messages]


def test_ranks_with_different_predictions_predict_no_size(two_ranks):
    assert two_ranks.run(expect_different_sizes) == [[10, 12]] * 2


def call_the_function(rank, world_size):
    with messages_sent() as messages:
        for channels in (3, 3, 4, 3, 4, 5):
            sync_batch_norm(torch.rand(2, channels), None, None, training=True)
    return [message.numel() for message in messages]


def test_calls_of_the_function_predict_no_size(two_ranks):
    """The next one may belong to any layer."""
    assert two_ranks.run(call_the_function) == [[10, 10, 12, 10, 12, 14]] * 2


def disagree_without_a_gradient(rank, world_size):
    """The inputs need no gradient; rank 1 begins with the other layer's backward pass."""
    layers = [SyncBatchNorm(3), SyncBatchNorm(3)]
    for number, layer in enumerate(layers):
        layer._syncbn = layer._syncbn.with_name(f"bn{number}")
    outputs = [layer(torch.rand(4, 3)).square().sum() for layer in layers]
    with pytest.raises(RuntimeError, match=f"this rank runs the backward pass of layer 'bn{rank}'"):
        outputs[rank].backward()


def test_backward_passes_without_a_gradient_of_the_input_are_verified(two_ranks):
    two_ranks.run(disagree_without_a_gradient)


def continue_after_a_failure(rank, world_size):
    layers = SyncBatchNorm(3), SyncBatchNorm(4)
    step(*layers)
    step(*layers)
    with pytest.raises(ValueError, match="expected the same channels"):
        step(*layers) if rank == 0 else step(layers[1])
    with messages_sent() as messages:
        step(*layers)
    return [message.numel() for message in messages], layers[0].running_mean


def test_ranks_continue_together_after_a_disagreement(two_ranks):
    (sizes, mean), (other_sizes, other_mean) = two_ranks.run(continue_after_a_failure)
    assert sizes == other_sizes == [10, 12, 12, 10]
    assert torch.equal(mean, other_mean)


def make_a_mistake_twice(rank, world_size):
    """Rank 1 has another layer; all continue after the error, like a loop that catches it."""
    a, b, c = SyncBatchNorm(3), SyncBatchNorm(4), SyncBatchNorm(5)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match="same channels|aborted"):
            step(a, c if rank == 1 else b)
    with messages_sent() as messages:
        step(a, b)
    return [message.numel() for message in messages]


def test_a_failed_pass_is_not_predicted(three_ranks):
    assert three_ranks.run(make_a_mistake_twice) == [[10, 12, 12, 10]] * 3


def train_with_another_past(rank, world_size):
    """Rank 1 has recreated a layer, and does not know which layers followed it elsewhere."""
    a, b, c = SyncBatchNorm(3), SyncBatchNorm(4), SyncBatchNorm(5)
    for second in (b, c, b):
        step(a, second)
    if rank == 1:
        a = SyncBatchNorm(3)
    with messages_sent() as messages:
        for second in (b, b, c):
            step(a, second)
    return [message.numel() for message in messages]


def test_ranks_with_different_histories_agree(two_ranks):
    with_b, with_c = [10, 12, 12, 10], [10, 14, 14, 10]
    assert two_ranks.run(train_with_another_past) == [[*with_b, *with_b, *with_c]] * 2


def abort_after_sends(rank, world_size):
    """Ranks 0 and 1 have run an operation that rank 2 has not: ranks cannot meet in the store."""
    if rank < 2:
        dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
    layer = SyncBatchNorm(3)
    layer(torch.ones(2, 3).long() if rank == 2 else torch.rand(2, 3))


@pytest.mark.trouble(
    "“aborted this forward pass”",
    "Another rank raised an error in this layer; the message quotes it",
    "Correct that error",
)
def test_rank_aborts_where_others_do_not_ask():
    with Ranks(3, case_seconds=30) as ranks:
        *others, failed = ranks.outcomes(abort_after_sends)
    assert failed.kind == "TypeError"
    assert all("aborted this forward pass" in other.message for other in others)


def read_the_tags_of_a_recomputation(rank, world_size):
    group, layer = dist.group.WORLD, Identity("body.bn1")
    state = group_state(group)
    first, again = (state.record(layer, way) for way in ("forward", "recomputation"))
    other = state.record(Identity("body.bn2"), "forward")
    message = torch.zeros(10).double()
    for fingerprint in (2 * first.fingerprint, 2 * again.fingerprint):
        message[-3] = fingerprint
        verify(message, again)
    message[-3] = other.fingerprint + again.fingerprint
    with pytest.raises(RuntimeError, match="this rank runs the recomputation of layer 'body.bn1'"):
        verify(message, again)
    return True


def test_recomputation_may_get_the_sums_of_the_forward_pass_and_no_others(two_ranks):
    assert two_ranks.run(read_the_tags_of_a_recomputation) == [True] * 2


def fail_without_channels(rank, world_size, steps):
    """Rank 1 calls the function with an input that has no channels, so no message size."""
    layer = SyncBatchNorm(3)
    for _ in range(steps):
        step(layer)
    if rank == 1:
        sync_batch_norm(None, None, None, training=True)
    layer(torch.rand(2, 3))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rank_without_a_size_aborts_with_the_others_size(steps, three_ranks):
    outcomes = three_ranks.outcomes(fail_without_channels, steps)
    assert outcomes[1].kind == "TypeError" and "[rank 1 of 3]" in outcomes[1].message
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.kind == "RuntimeError"
        assert "aborted this forward pass" in outcome.message
        assert "rank 1: TypeError: expected input to be a torch.Tensor" in outcome.message


def run_out_after_the_sum_and_continue(rank, world_size):
    """Rank 1 fails unnoticed by the others, and begins the next step."""
    layers = SyncBatchNorm(3), SyncBatchNorm(4)
    step(*layers)
    step(*layers)
    if rank == 1:
        no_memory = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
        with (
            ops.replaced(batch_norm_apply=no_memory),
            pytest.raises(torch.OutOfMemoryError),
        ):
            step(*layers)
    step(*layers)


def test_rank_that_continues_after_its_own_failure_stays_in_agreement():
    with Ranks(3, case_seconds=30) as ranks:
        outcomes = ranks.outcomes(run_out_after_the_sum_and_continue)
    assert [outcome.kind for outcome in outcomes] == ["ValueError"] * 3
    assert all("expected the same channels" in outcome.message for outcome in outcomes)


def make_three_directions_of_one_layer(rank, world_size):
    """Rank 0 runs the next step, rank 1 recomputes, rank 2 differentiates."""
    layer = SyncBatchNorm(3)
    x = torch.rand(4, 3, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False) if rank == 1 else layer(x)
    if rank == 0:
        layer(x)
    else:
        y.sum().backward()


def test_no_rank_takes_the_sum_of_two_other_passes_for_its_own(three_ranks):
    """One rank would, if the directions had consecutive numbers."""
    for outcome in three_ranks.outcomes(make_three_directions_of_one_layer):
        assert "the ranks run different passes" in outcome.message


def test_fingerprints_do_not_add_up_to_others():
    numbers = [digest(layer, way) for layer in range(100) for way in states._DIRECTIONS]
    known = set(numbers)
    assert len(known) == 500
    sums = (a + b for a, b in itertools.combinations(numbers, 2))
    # By chance each of 125,000 sums, in 2**29 numbers, equals one of 500.
    assert not any(total % 2 == 0 and total // 2 in known for total in sums)


def call_with_other_channels(rank, world_size, channels, others):
    """Rank 1 calls the function with other numbers of channels in the fourth step."""
    options = {"training": True, "process_group": dist.new_group()}  # without expected sizes
    for step_number in range(4):
        sizes = others if rank == 1 and step_number == 3 else channels
        inputs = [torch.rand(4, c, requires_grad=True) for c in sizes]
        sum(sync_batch_norm(x, None, None, **options).sum() for x in inputs).backward()


@pytest.mark.parametrize("others", [[7, 5, 5], [3, 7, 5], [3, 5, 3], [3, 5], [3], [3, 5, 5, 7]])
def test_calls_of_the_function_with_other_channels_on_one_rank(others, two_ranks):
    """Without a check, gloo would end a process."""
    for outcome in two_ranks.outcomes(call_with_other_channels, [3, 5, 5], others):
        expected = "the ranks run different passes|expected the same channels"
        assert re.search(expected, outcome.message)
