"""The stand-in's NCCL gives each rank NCCL's results: collectives, groups, communicators."""

import ctypes

import nccl_ranks
import pytest
from nccl_ranks import MAX, SUM, TYPES, Buffer, Stream, group

pytestmark = pytest.mark.any_torch

MODES = ["inline", "async", "late"]


def values_of(rank, count):
    return [(rank + 1) * (i % 7 + 1) for i in range(count)]


# --- Reductions


def reduces(meeting, count):
    communicator = meeting.join()
    results = {}
    for kind in TYPES:
        for op in (SUM, MAX):
            buffer = Buffer(values_of(meeting.rank, count), kind)
            communicator.all_reduce(buffer, op)
            results[kind.__name__, op] = buffer.get()
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_reduce(world_size):
    count = 5
    parts = [values_of(rank, count) for rank in range(world_size)]
    columns = list(zip(*parts, strict=True))
    expected = {SUM: [sum(c) for c in columns], MAX: [max(c) for c in columns]}
    for outcome in nccl_ranks.run(reduces, world_size, count):
        assert len(outcome) == 2 * len(TYPES)
        for (kind, op), values in outcome.items():
            assert values == expected[op], (kind, op)


def reduces_much(meeting, count):
    communicator = meeting.join()
    buffer = Buffer(values_of(meeting.rank, count), ctypes.c_double)
    communicator.all_reduce(buffer)
    return buffer.get()


@pytest.mark.parametrize("streams", MODES)
def test_all_reduce_of_more_than_a_slot(streams):
    count = 100_003
    expected = [6 * v for v in values_of(0, count)]
    outcomes = nccl_ranks.run(reduces_much, 3, count, streams=streams)
    assert all(outcome == expected for outcome in outcomes)


def adds_up_in_order(meeting):
    communicator = meeting.join()
    buffer = Buffer([[1e8, 1.0, -1e8][meeting.rank]])
    communicator.all_reduce(buffer)
    return buffer.get()


def test_sums_are_added_in_the_order_of_ranks():
    assert nccl_ranks.run(adds_up_in_order, 3) == [[0.0]] * 3


# --- Other collectives


def moves(meeting, count):
    communicator = meeting.join()
    rank, size = meeting.rank, meeting.world_size
    number = ctypes.c_size_t(count)
    results = {}

    def call(name, num_out, *arguments):
        given = Buffer((100 * rank + i % 97 for i in range(count)), ctypes.c_int32)
        taken = Buffer([-1] * (num_out * count), ctypes.c_int32)
        communicator.call(name, given.address, taken.address, number, taken.type, *arguments)
        results[name] = taken.get()

    call("ncclBroadcast", 1, 1)
    call("ncclAllGather", size)
    return results


@pytest.mark.parametrize(("count", "streams"), [(3, "inline"), (0, "inline"), (70_000, "late")])
def test_collectives_that_move(count, streams):
    parts = [[100 * rank + i % 97 for i in range(count)] for rank in range(3)]
    expected = {"ncclBroadcast": parts[1], "ncclAllGather": [v for part in parts for v in part]}
    assert nccl_ranks.run(moves, 3, count, streams=streams) == [expected] * 3


def groups_collectives(meeting):
    communicator = meeting.join()
    buffer = Buffer([1.0 + meeting.rank])
    with group():
        with group():
            communicator.broadcast(buffer, 1)
        communicator.all_reduce(buffer)
        before = buffer.get()
    return [before, buffer.get()]


def test_group_of_collectives():
    """They are enqueued in their order, at the end of the outermost group."""
    assert nccl_ranks.run(groups_collectives, 2) == [[[1.0], [4.0]], [[2.0], [4.0]]]


# --- Communicators


def splits(meeting):
    parent = meeting.join()
    rank = meeting.rank
    pending = Buffer([1.0])
    parent.all_reduce(pending)  # a split does not wait for it
    child = parent.split(rank % 2, -rank)
    sums = [Buffer([float(rank)]), Buffer([float(rank)])]
    child.all_reduce(sums[0])
    parent.all_reduce(sums[1])
    first = Buffer([float(rank)])
    child.broadcast(first, 0)  # the highest rank, by its key
    nobody = parent.split(-1 if rank == 0 else 5, 0)
    assert (nobody is None) == (rank == 0)
    if nobody is not None:
        sums.append(Buffer([float(rank)]))
        nobody.all_reduce(sums[2])
    return [pending.get(), first.get(), *(s.get() for s in sums)]


@pytest.mark.parametrize("streams", ["inline", "late"])
def test_split(streams):
    assert nccl_ranks.run(splits, 3, streams=streams) == [
        [[3.0], [2.0], [2.0], [3.0]],
        [[3.0], [1.0], [1.0], [3.0], [3.0]],
        [[3.0], [2.0], [2.0], [3.0], [3.0]],
    ]


def joins_again(meeting):
    results = []
    for _ in range(3):
        communicators = [meeting.join() for _ in range(2)]
        buffers = [Buffer([1.0]), Buffer([10.0])]
        order = (0, 1) if meeting.rank == 0 else (1, 0)
        for i in order:  # on streams of their own, so that nothing orders them
            communicators[i].all_reduce(buffers[i])
        results += [buffer.get() for buffer in buffers]
        for communicator in communicators:
            communicator.destroy()
    return results


def test_destroy_and_join_again():
    assert nccl_ranks.run(joins_again, 2, streams="async") == [[[2.0], [20.0]] * 3] * 2


def uses_two_streams(meeting):
    communicator = meeting.join()
    buffer = Buffer([1.0])
    for stream in [Stream(), Stream()] * 5:
        communicator.all_reduce(buffer, stream=stream)
    return buffer.get()


@pytest.mark.parametrize("streams", MODES)
def test_work_of_two_streams_runs_in_the_order_of_calls(streams):
    """NCCL too makes each stream wait for the communicator's last work."""
    assert nccl_ranks.run(uses_two_streams, 2, streams=streams) == [[1024.0]] * 2


def captures_two_streams(meeting):
    communicator = meeting.join()
    library, buffer, event = nccl_ranks.library, Buffer([0.0]), ctypes.c_void_p()
    first, second = Stream(), Stream()
    assert library.cudaEventCreate(ctypes.byref(event)) == 0

    def enqueue():
        assert library.cudaEventRecord(event, first) == 0
        assert library.cudaStreamWaitEvent(second, event, 0) == 0
        communicator.all_reduce(buffer, SUM, first)
        communicator.all_reduce(buffer, MAX, second)
        communicator.all_reduce(buffer, MAX, first)

    graph = nccl_ranks.capture(first, enqueue)
    buffer.array[0] = 1.0 + meeting.rank
    assert library.cudaGraphLaunch(graph, first) == 0
    return buffer.get()


@pytest.mark.parametrize("streams", MODES)
def test_captured_work_of_two_streams_has_the_order_of_calls(streams):
    # 4 if a maximum precedes the sum
    assert nccl_ranks.run(captures_two_streams, 2, streams=streams) == [[3.0]] * 2


def is_one_of_many(meeting):
    communicator = meeting.join()
    buffer = Buffer([1.0])
    communicator.all_reduce(buffer)
    return buffer.get()


def test_many_ranks():
    assert nccl_ranks.run(is_one_of_many, 20) == [[20.0]] * 20
