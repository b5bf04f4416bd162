"""Comparisons through the group's store, and that nothing stays in it."""

import gc

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    recompute_statistics,
    revert_sync_batchnorm,
)
from syncbn.distributed import negotiation
from syncbn.distributed import state as states
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.state import group_state
from syncbn.distributed.store import PassReport, text_of
from syncbn.distributed.sums import all_reduce

CPU = torch.device("cpu")


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
        for early, late in ranks.run(keep_nothing, 100):
            assert early == late


def make_layers_all_the_time(rank, world_size):
    negotiation._MAX_COMPARISONS, states._MAX_RECORDS = 10, 20
    store = dist.group.WORLD.get_group_store()
    keys = []
    for number in range(60):
        for layer in (SyncBatchNorm(3), SyncBatchNorm(4)):
            layer(torch.rand(4, layer.num_features).requires_grad_()).sum().backward()
        if number in (30, 59):
            keys.append(store.num_keys())
    return keys, len(group_state(dist.group.WORLD)._records)


def test_new_layers_in_each_step_do_not_fill_the_store_or_the_memory():
    with Ranks(2) as ranks:
        for (early, late), records in ranks.run(make_layers_all_the_time):
            assert early == late and records <= 20


def convert_and_recompute_all_the_time(rank, world_size):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    numbers = []
    for _ in range(4):
        convert_sync_batchnorm(model)
        model(torch.rand(4, 3).requires_grad_()).sum().backward()
        recompute_statistics(model, [torch.rand(4, 3)])
        revert_sync_batchnorm(model)
        gc.collect()
        numbers.append(len(group_state(dist.group.WORLD)._records))
    return numbers


def test_records_end_with_their_layers(two_ranks):
    for numbers in two_ranks.run(convert_and_recompute_all_the_time):
        assert numbers[1:] == numbers[:1] * 3


def compare_in_the_store(rank, world_size):
    group = dist.group.WORLD
    state = group_state(group)
    found = []
    for size in (10, 18, 34 + 2 * rank):
        record = state.record(Identity(""), "forward")
        state.num_passes, state.size = state.num_passes + 1, size
        found.append(negotiation._compare(state, record, CPU))
        dist.all_reduce(torch.ones(1))
    return found


def test_comparison_finds_differing_ranks_only_if_there_are_any():
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

    def allreduce(self, tensors, options):
        return None

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
        all_reduce(torch.zeros(size), record)  # finds no other size


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
        all_reduce(torch.zeros(size), state.record(Identity(""), "forward"))
    assert group.store.requests == requests


@pytest.mark.parametrize("words", ["", "with several words"])
def test_report_survives_the_store(words):
    report = PassReport(9, 17, 1, words)
    assert PassReport.parse(report.encode().encode()) == report


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("words"), "ValueError: words"),
        (OSError("no /data/caf\udce9.jpg"), "OSError: no /data/caf\\udce9.jpg"),
        (UnreadableError(), "UnreadableError: its text cannot be read: ValueError"),
    ],
    ids=["plain", "surrogate", "unreadable"],
)
def test_text_of_every_error_survives_the_store(error, text):
    group = Group(dist.HashStore())
    state = group_state(group)
    state.store.write_abort(PassReport(0, 0, 1, text_of(error)))
    assert state.store.read_abort() == (0, 0, 1, text)


def test_sizes_of_double_backward_passes_are_not_channels():
    group = Group(dist.HashStore())
    state = group_state(group)
    state.size = 13
    report = state.report(state.record(Identity("body.bn1"), "double backward"))
    assert report.text == "runs the double backward pass of layer 'body.bn1'"
    assert states.same_channels(report, report._replace(size=10))


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
