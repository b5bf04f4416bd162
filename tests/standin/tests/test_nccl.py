"""The stand-in's NCCL gives each rank NCCL's results: collectives, groups, communicators."""

import ctypes

import nccl_ranks
import pytest
from nccl_ranks import AVG, MAX, MIN, PROD, SUM, TYPES, Buffer, Communicator, Stream, group

pytestmark = pytest.mark.any_torch

MODES = ["inline", "async", "late"]


def values_of(rank, count):
    return [(rank + 1) * (i % 7 + 1) for i in range(count)]


# --- Reductions


def reduces(meeting, count):
    communicator = meeting.join()
    results = {}
    for kind in TYPES:
        for op in (SUM, PROD, MAX, MIN, AVG):
            buffer = Buffer(values_of(meeting.rank, count), kind)
            communicator.all_reduce(buffer, op)
            results[kind.__name__, op] = buffer.get()
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_reduce(world_size):
    count = 5
    parts = [values_of(rank, count) for rank in range(world_size)]
    columns = list(zip(*parts, strict=True))
    product = [1] * count
    for part in parts:
        product = [p * v for p, v in zip(product, part, strict=True)]
    expected = {
        SUM: [sum(c) for c in columns],
        PROD: product,
        MAX: [max(c) for c in columns],
        MIN: [min(c) for c in columns],
        AVG: [sum(c) / world_size for c in columns],
    }
    for outcome in nccl_ranks.run(reduces, world_size, count):
        for (kind, op), values in outcome.items():
            if kind in ("c_byte", "c_ubyte") and op == PROD:  # wraps around
                assert [v % 256 for v in values] == [v % 256 for v in expected[op]]
            else:
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


def multiplies(meeting):
    communicator = meeting.join()
    factor = ctypes.c_float(0.5 * (meeting.rank + 1))
    op = ctypes.c_int()
    host_immediate = 1
    communicator_call = nccl_ranks.library.ncclRedOpCreatePreMulSum
    nccl_ranks.check(
        communicator_call(
            ctypes.byref(op),
            ctypes.byref(factor),
            TYPES[ctypes.c_float],
            host_immediate,
            communicator.handle,
        )
    )
    buffer = Buffer([2.0, 4.0])
    communicator.all_reduce(buffer, op.value)
    nccl_ranks.check(nccl_ranks.library.ncclRedOpDestroy(op, communicator.handle))
    return buffer.get()


def test_each_rank_has_its_own_factor():
    assert nccl_ranks.run(multiplies, 2) == [[3.0, 6.0]] * 2


# --- Other collectives


def moves(meeting, count):
    communicator = meeting.join()
    rank, size = meeting.rank, meeting.world_size
    number = ctypes.c_size_t(count)
    results = {}

    def call(name, num_in, num_out, *arguments):
        given = Buffer((100 * rank + i % 97 for i in range(num_in * count)), ctypes.c_int32)
        taken = Buffer([-1] * (num_out * count), ctypes.c_int32)
        communicator.call(name, given.address, taken.address, number, taken.type, *arguments)
        results[name] = taken.get()

    call("ncclBroadcast", 1, 1, 1)
    call("ncclAllGather", 1, size)
    call("ncclReduce", 1, 1, SUM, 1)
    call("ncclReduceScatter", size, 1, SUM)
    call("ncclAlltoAll", size, size)
    call("ncclGather", 1, size, 1)
    call("ncclScatter", size, 1, 1)
    return results


@pytest.mark.parametrize(("count", "streams"), [(3, "inline"), (0, "inline"), (70_000, "late")])
def test_collectives(count, streams):
    size = 3

    def part(rank, index):
        return [100 * rank + i % 97 for i in range(index * count, (index + 1) * count)]

    def total(parts):
        return [sum(c) for c in zip(*parts, strict=True)]

    def joined(parts):
        return [value for one in parts for value in one]

    nothing = [-1] * count
    outcomes = nccl_ranks.run(moves, size, count, streams=streams)
    for rank, outcome in enumerate(outcomes):
        firsts = joined(part(r, 0) for r in range(size))
        assert outcome == {
            "ncclBroadcast": part(1, 0),
            "ncclAllGather": firsts,
            "ncclReduce": total(part(r, 0) for r in range(size)) if rank == 1 else nothing,
            "ncclReduceScatter": total(part(r, rank) for r in range(size)),
            "ncclAlltoAll": joined(part(r, rank) for r in range(size)),
            "ncclGather": firsts if rank == 1 else nothing * size,
            "ncclScatter": part(1, rank),
        }


# --- Sends and receives


def rotates(meeting, count):
    """Exchange values with all ranks, receiving in the reverse order of sending."""
    communicator = meeting.join()
    rank, size = meeting.rank, meeting.world_size
    mine = Buffer(values_of(rank, count))
    others = [Buffer([-1.0] * count) for _ in range(size)]
    with group():
        for peer in range(size):
            communicator.send(mine, peer)
        for peer in reversed(range(size)):
            communicator.receive(others[peer], peer)
    return [other.get() for other in others]


@pytest.mark.parametrize(("count", "streams"), [(3, "inline"), (200_000, "inline"), (9, "late")])
def test_group_of_sends_and_receives(count, streams):
    expected = [values_of(rank, count) for rank in range(3)]
    assert nccl_ranks.run(rotates, 3, count, streams=streams) == [expected] * 3


def sends_in_order(meeting):
    communicator = meeting.join()
    buffers = [Buffer([float(i)] * (i + 1)) for i in range(3)]
    for buffer in buffers:
        if meeting.rank == 0:
            communicator.send(buffer, 1)
        else:
            buffer.array[:] = [-1.0] * buffer.count
            communicator.receive(buffer, 0)
    total = Buffer([1.0])
    communicator.all_reduce(total)
    return [buffer.get() for buffer in [*buffers, total]]


def test_messages_keep_their_order_and_collectives_follow():
    expected = [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0], [2.0]]
    assert nccl_ranks.run(sends_in_order, 2) == [expected] * 2


def groups_collectives(meeting):
    communicator = meeting.join()
    first, second, third = Buffer([1.0]), Buffer([meeting.rank]), Buffer([-1.0])
    with group(), group():
        peer = 1 - meeting.rank
        communicator.receive(third, peer)
        communicator.send(second, peer)
        communicator.all_reduce(first)
    communicator.broadcast(second, 1)
    return [first.get(), second.get(), third.get()]


def test_group_of_collectives_and_messages():
    outcomes = nccl_ranks.run(groups_collectives, 2)
    assert outcomes == [[[2.0], [1.0], [1.0 - rank]] for rank in range(2)]


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


def is_one_of_many(meeting):
    communicator = meeting.join()
    buffer = Buffer([1.0])
    communicator.all_reduce(buffer)
    return buffer.get()


def test_many_ranks():
    assert nccl_ranks.run(is_one_of_many, 20) == [[20.0]] * 20


def makes_all_of_a_process(meeting):
    handles = (ctypes.c_void_p * 2)()
    nccl_ranks.check(nccl_ranks.library.ncclCommInitAll(handles, 2, (ctypes.c_int * 2)(0, 0)))
    communicators = [Communicator(ctypes.c_void_p(handle)) for handle in handles]
    buffers = [Buffer([1.0]), Buffer([2.0])]
    with group():
        for communicator, buffer in zip(communicators, buffers, strict=True):
            communicator.all_reduce(buffer)
    return [buffer.get() for buffer in buffers]


@pytest.mark.parametrize("streams", ["inline", "async"])
def test_ranks_of_one_process(streams):
    assert nccl_ranks.run(makes_all_of_a_process, 1, streams=streams) == [[[3.0], [3.0]]]
