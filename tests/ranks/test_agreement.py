"""How ranks agree on their passes: what it costs, and when they ask each other."""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.groups import messages_sent
from support.ranks import Ranks
from torch import nn

from syncbn import SyncBatchNorm, convert_sync_batchnorm, ops, recompute_statistics, sync_batch_norm
from syncbn.distributed import abort, protocol, sync
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.protocol import group_state
from syncbn.distributed.store import PassReport

CPU = torch.device("cpu")


def step(*layers):
    """One training step through layers of any number of channels."""
    total = sum(layer(torch.rand(4, layer.num_features).requires_grad_()).sum() for layer in layers)
    total.backward()


def change_together(rank, world_size, late):
    a, b, c = SyncBatchNorm(3), SyncBatchNorm(4), SyncBatchNorm(5)
    sent = []
    for layers in [(a, b), (a, b), (a, c), (a, c), (a, b), (a, c)]:
        with messages_sent() as messages:
            b_or_c = layers[1]
            step(layers[0], *([Late()] if late and rank == 1 and b_or_c is c else []), b_or_c)
        sent.append([message.numel() for message in messages])
    return sent


class Late(nn.Module):
    """Comes later than other ranks wait."""

    num_features = 1

    def forward(self, x):
        time.sleep(3)  # a FileStore counts in whole seconds
        return x


@pytest.mark.parametrize("late", [False, True])
def test_ranks_that_change_together_agree_once(two_ranks, late):
    """Late ranks in a message of the size that was expected, of 4 channels for 5."""
    with_b, with_c = [10, 12, 12, 10], [10, 14, 14, 10]
    first = [10, 12, *with_c[1:]] if late else with_c
    for sent in two_ranks.run(change_together, late):
        assert sent == [with_b, with_b, first, with_c, with_b, with_c]


class Subclass(torch.Tensor):
    """As MONAI's and fastai's tensors."""


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
def test_ranks_part_with_inputs_of_a_tensor_subclass(backward):
    """Told in words, as with plain tensors, and not by gloo's end of a process."""
    with Ranks(2) as ranks:
        ranks.run(part_with_a_subclass, backward)


def keep_nothing(rank, world_size, steps):
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    store = dist.group.WORLD.get_group_store()
    state = group_state(dist.group.WORLD)
    kept = []
    for number in range(steps):
        if number in (2, steps - 1):
            sizes = [len(record.sizes) for record in state._records.values()]
            kept.append((store.num_keys(), sizes))
        model(torch.rand(2, 3)).sum().backward()
    return kept


def test_steps_leave_nothing_in_the_store_or_in_memory():
    with Ranks(2) as ranks:
        for early, late in ranks.run(keep_nothing, 1000):
            assert early == late


def make_layers_all_the_time(rank, world_size):
    protocol._MAX_COMPARISONS, protocol._MAX_RECORDS = 10, 20
    store = dist.group.WORLD.get_group_store()
    keys = []
    for number in range(60):
        step(SyncBatchNorm(3), SyncBatchNorm(4))
        if number in (30, 59):
            keys.append(store.num_keys())
    return keys, len(group_state(dist.group.WORLD)._records)


def test_new_layers_in_each_step_do_not_fill_the_store_or_the_memory():
    with Ranks(2) as ranks:
        for (early, late), records in ranks.run(make_layers_all_the_time):
            assert early == late and records <= 20


def compare_in_the_store(rank, world_size):
    group = dist.group.WORLD
    state = group_state(group)
    found = []
    for size in (10, 18, 34 + 2 * rank):
        record = state.record(Identity(""), "forward")
        found.append(state.enter(record, size, CPU))
        dist.all_reduce(torch.ones(1))
    return found


def test_comparison_finds_who_differs_and_only_then():
    with Ranks(2) as ranks:
        results = ranks.run(compare_in_the_store)
    assert [found[:2] for found in results] == [[None, None]] * 2
    last = [found[2] for found in results]
    assert sorted(report is None for report in last) == [False, True]
    (report,) = [report for report in last if report is not None]
    other = last.index(None)
    assert report.size == 34 + 2 * other
    assert report.rank == other
    assert report.text == f"runs the forward pass of a layer with {15 + other} channels"


class Group:
    """A process group whose name and count of operations are those of others."""

    group_name = "0"
    _device_types = (CPU,)

    def __init__(self, store, size=2):
        self.store, self.num_ranks = store, size

    def rank(self):
        return 0

    def size(self):
        return self.num_ranks

    def get_group_store(self):
        return self.store

    def _get_backend(self, device):
        return self

    def _get_sequence_number_for_group(self):
        return 0


def test_second_group_of_a_name_is_not_mistaken_for_the_first():
    store = dist.HashStore()
    for size in (10, 18):
        group = Group(store)
        state = group_state(group)
        record = state.record(Identity(""), "forward")
        assert state.enter(record, size, CPU) is None


class CountingStore(dist.HashStore):
    requests = 0

    def compare_set(self, *arguments):
        self.requests += 1
        return super().compare_set(*arguments)


@pytest.mark.parametrize(("num_ranks", "requests"), [(1024, 6), (1025, 2)])
def test_many_ranks_compare_each_size_once(num_ranks, requests):
    group = Group(CountingStore(), num_ranks)
    state = group_state(group)
    for size in (10, 10, 18, 18, 10, 18):
        state.enter(state.record(Identity(""), "forward"), size, CPU)
    assert group.store.requests == requests


@pytest.mark.parametrize("words", ["", "with several words"])
def test_report_survives_the_store(words):
    report = PassReport(9, 17, 1, words)
    assert PassReport.parse(report.encode().encode()) == report


def expect_different_sizes(rank, world_size):
    """Rank 1 has made other steps with the layer before, which no rank heard."""
    group, layer, other = dist.group.WORLD, SyncBatchNorm(3), SyncBatchNorm(4)
    state = group_state(group)
    state.record(layer._syncbn.identity, "forward").add_size(10 + 2 * rank)
    with messages_sent() as messages:
        layer(torch.rand(2, 3))
        other(torch.rand(2, 4))
    return [message.numel() for message in messages]


def test_ranks_that_expect_different_sizes_expect_nothing(two_ranks):
    assert two_ranks.run(expect_different_sizes) == [[10, 12]] * 2


def call_the_function(rank, world_size):
    with messages_sent() as messages:
        for channels in (3, 3, 4, 3, 4, 5):
            sync_batch_norm(torch.rand(2, channels), None, None, training=True)
    return [message.numel() for message in messages]


def test_calls_of_the_function_expect_nothing(two_ranks):
    """The next one may belong to any layer."""
    assert two_ranks.run(call_the_function) == [[10, 10, 12, 10, 12, 14]] * 2


def disagree(rank, world_size):
    """Rank 1 has the layers of one size in another order."""
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    step(*(model if rank == 0 else reversed(model)))


def test_ranks_that_disagree_know_each_others_pass():
    with Ranks(3, case_seconds=30) as ranks:
        outcomes = ranks.outcomes(disagree)
    for rank, outcome in enumerate(outcomes):
        own, other = ("0", "1") if rank == 0 else ("1", "0")
        assert outcome.kind == "RuntimeError"
        assert f"this rank runs the forward pass of layer '{own}'" in outcome.message
        assert f"runs the forward pass of layer '{other}'" in outcome.message
        assert f"[layer '{own}', rank {rank} of 3]" in outcome.message


def go_on_after_a_failure(rank, world_size):
    layers = SyncBatchNorm(3), SyncBatchNorm(4)
    step(*layers)
    step(*layers)
    with pytest.raises(ValueError, match="expected the same channels"):
        step(*layers) if rank == 0 else step(layers[1])
    with messages_sent() as messages:
        step(*layers)
    return [message.numel() for message in messages], layers[0].running_mean


def test_ranks_go_on_together_after_a_disagreement(two_ranks):
    (sizes, mean), (other_sizes, other_mean) = two_ranks.run(go_on_after_a_failure)
    assert sizes == other_sizes == [10, 12, 12, 10]
    assert torch.equal(mean, other_mean)


def make_a_mistake_twice(rank, world_size):
    """Rank 1 has another layer, and all go on after the error, as a loop does that catches it."""
    a, b, c = SyncBatchNorm(3), SyncBatchNorm(4), SyncBatchNorm(5)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match="same channels|aborted"):
            step(a, c if rank == 1 else b)
    with messages_sent() as messages:
        step(a, b)
    return [message.numel() for message in messages]


def test_a_mistake_is_not_learned():
    with Ranks(3, case_seconds=30) as ranks:
        assert ranks.run(make_a_mistake_twice) == [[10, 12, 12, 10]] * 3


def train_with_another_past(rank, world_size):
    """Rank 1 has made a layer anew, and does not know what has followed it elsewhere."""
    a, b, c = SyncBatchNorm(3), SyncBatchNorm(4), SyncBatchNorm(5)
    for second in (b, c, b):
        step(a, second)
    if rank == 1:
        a = SyncBatchNorm(3)
    with messages_sent() as messages:
        for second in (b, b, c):
            step(a, second)
    return [message.numel() for message in messages]


def test_ranks_of_different_pasts_fit_together():
    with_b, with_c = [10, 12, 12, 10], [10, 14, 14, 10]
    with Ranks(2, case_seconds=30) as ranks:
        assert ranks.run(train_with_another_past) == [[*with_b, *with_b, *with_c]] * 2


def abort_after_sends(rank, world_size):
    """Ranks 0 and 1 have made an operation that rank 2 has not: the store is no place to meet."""
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


def test_double_backward_passes_are_not_of_channels():
    group = Group(dist.HashStore())
    state = group_state(group)
    state.size = 13
    report = state.report(state.record(Identity("body.bn1"), "double backward"))
    assert report.text == "runs the double backward pass of layer 'body.bn1'"
    assert protocol.same_channels(report, report._replace(size=10))


def read_the_tags_of_a_recomputation(rank, world_size):
    group, layer = dist.group.WORLD, Identity("body.bn1")
    state = group_state(group)
    first, again = (state.record(layer, way) for way in ("forward", "recomputation"))
    other = state.record(Identity("body.bn2"), "forward")
    message = torch.zeros(10).double()
    for fingerprint in (2 * first.fingerprint, 2 * again.fingerprint):
        message[-3] = fingerprint
        sync.Pass(group, layer, "recomputation").verify(message)
    message[-3] = other.fingerprint + again.fingerprint
    with pytest.raises(RuntimeError, match="this rank runs the recomputation of layer 'body.bn1'"):
        sync.Pass(group, layer, "recomputation").verify(message)
    return True


def test_recomputation_may_get_the_sums_of_the_forward_pass_and_no_others():
    with Ranks(2, case_seconds=30) as ranks:
        assert ranks.run(read_the_tags_of_a_recomputation) == [True] * 2


def fail_without_channels(rank, world_size, steps):
    """Rank 1 calls the function with nothing that tells the size of its message."""
    layer = SyncBatchNorm(3)
    for _ in range(steps):
        step(layer)
    if rank == 1:
        sync_batch_norm(None, None, None, training=True)
    layer(torch.rand(2, 3))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rank_that_knows_no_size_aborts_from_what_others_send(steps):
    with Ranks(3, case_seconds=30) as ranks:
        outcomes = ranks.outcomes(fail_without_channels, steps)
    assert outcomes[1].kind == "TypeError" and "[rank 1 of 3]" in outcomes[1].message
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.kind == "RuntimeError"
        assert "aborted this forward pass" in outcome.message
        assert "rank 1: TypeError: expected input to be a torch.Tensor" in outcome.message


def hear_late(rank, world_size, status, name, direction):
    """As an operator on CUDA would have noted it in a pass before."""
    layer, group = SyncBatchNorm(3), dist.group.WORLD
    layer._syncbn = layer._syncbn.with_name(name)
    state = group_state(group)
    fingerprint = state.record(layer._syncbn.identity, direction).fingerprint
    state.status(CPU).note.fill_(status * world_size * fingerprint)
    with pytest.raises(RuntimeError) as error:
        sync._raise_earlier_failure(state)
    sync._raise_earlier_failure(state)  # says it once
    del state.statuses[CPU]
    return str(error.value)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("name", "layer"), [("body.bn1", "layer 'body.bn1'"), ("", "a layer")])
@pytest.mark.parametrize(("status", "words"), [(-1, "aborted"), (1, "made another pass")])
def test_status_of_a_pass_before_names_it(two_ranks, status, words, name, layer, direction):
    for said in two_ranks.run(hear_late, status, name, direction):
        assert said.startswith(f"the {direction} pass of {layer} gave NaN: another rank")
        assert words in said


def stop_at_different_passes(rank, world_size, others):
    """As over NCCL: a rank's host has started as many more passes as its number."""
    group, layer = dist.group.WORLD, SyncBatchNorm(3)
    step(layer)
    state = group_state(group)
    started = []
    for size in (10, 12, 14)[:rank]:
        state.store.num_passes += 1
        state.sizes_sent.append(size)
        message = torch.ones(size, dtype=torch.float64)
        started.append(dist.all_reduce(message, async_op=True))
    if others and rank == 2:  # a collective of DistributedDataParallel
        dist.all_reduce(torch.ones(1), async_op=True)
    if rank == 2:
        time.sleep(2)
    settled = abort.align(state, CPU, "words" if rank == 0 else "", timedelta(seconds=20))
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


def test_ranks_that_cannot_get_in_step_say_so():
    with Ranks(3) as own:
        for _, hindrance in own.run(stop_at_different_passes, True):
            assert "that are not of SyncBatchNorm layers" in hindrance


def stop_late(rank, world_size):
    """Rank 1 does not hear of the failure of rank 0 in the time that that waits."""
    group, layer = dist.group.WORLD, SyncBatchNorm(3)
    step(layer)
    group_state(group).is_misaligned = rank == 0
    dist.barrier()
    if rank == 1:
        time.sleep(3)
        abort.align(group_state(group), CPU)
        step(layer)
        return ""
    settled = abort.align(group_state(group), CPU, timeout=timedelta(seconds=1))
    step(layer)  # waits for rank 1
    return settled.hindrance


def test_rank_that_has_failed_waits_for_the_others_before_its_next_pass(two_ranks):
    assert two_ranks.run(stop_late) == ["rank 1 does not know of it yet", ""]


def run_out_after_the_sum_and_go_on(rank, world_size):
    """Rank 1 fails where the others do not hear it, and begins the next step."""
    layers = SyncBatchNorm(3), SyncBatchNorm(4)
    step(*layers)
    step(*layers)
    if rank == 1:
        no_memory = torch.OutOfMemoryError("CUDA out of memory.")
        with (
            mock.patch.object(ops, "batch_norm_apply", side_effect=no_memory),
            pytest.raises(torch.OutOfMemoryError),
        ):
            step(*layers)
    step(*layers)


def test_rank_that_goes_on_after_its_own_failure_still_knows_the_others():
    with Ranks(3, case_seconds=30) as ranks:
        outcomes = ranks.outcomes(run_out_after_the_sum_and_go_on)
    assert [outcome.kind for outcome in outcomes] == ["ValueError"] * 3
    assert all("expected the same channels" in outcome.message for outcome in outcomes)


def keys_left(rank, world_size, cause):
    """The keys in the group's store after some failures or recomputations, and after more."""
    group = dist.new_group()
    layers = [SyncBatchNorm(3, process_group=group) for _ in range(2)]
    for layer, name in zip(layers, ("one", "other"), strict=True):
        layer._syncbn = layer._syncbn.with_name(name)
    counts = []
    for _ in range(2):
        for _ in range(8):
            if cause == "recompute":
                recompute_statistics(layers[0], [torch.rand(4, 3)])
                continue
            channels = 3 + rank if cause == "abort" else 3
            layer = layers[rank if cause == "passes" else 0]
            with pytest.raises((RuntimeError, ValueError), match=r"aborted|3 channels|different"):
                layer(torch.rand(4, channels))
            layers[0](torch.rand(4, 3))
        dist.barrier()
        counts.append(group.get_group_store().num_keys())
        dist.barrier()
    return counts


@pytest.mark.parametrize("cause", ["recompute", "abort", "passes"])
def test_store_keeps_no_key_of_each_failure(two_ranks, cause):
    for some, more in two_ranks.run(keys_left, cause):
        assert some == more
