"""The stand-in's NCCL soon refuses calls that NCCL leaves undefined, with a message."""

import functools
import os
import threading
import time

import nccl_ranks
import pytest
from nccl_ranks import (
    FLOAT16,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    PROD,
    REMOTE_ERROR,
    SUM,
    Buffer,
    NcclError,
    Stream,
)

pytestmark = pytest.mark.any_torch


def is_spoiled(values):
    return all(value != value or value == -1 for value in values)  # all bits are set


# --- Ranks that disagree


def calls(meeting, name):
    """Let rank 0 sum five values, and rank 1 call something else."""
    communicator = meeting.join()
    five, four = Buffer([1.0] * 5), Buffer([1.0] * 4)
    whole = Buffer([1] * 5, nccl_ranks.ctypes.c_int32)
    choice = name if meeting.rank == 1 else "all_reduce"
    try:
        {
            "all_reduce": lambda: communicator.all_reduce(five),
            "count": lambda: communicator.all_reduce(four),
            "type": lambda: communicator.all_reduce(whole),
            "op": lambda: communicator.all_reduce(five, MAX),
            "collective": lambda: communicator.broadcast(five, 1),
        }[choice]()
    except NcclError as error:
        code, words = error.code, str(error)
    else:
        code, words = communicator.wait_for_error(), ""
        five.get()
        words = nccl_ranks.library.ncclGetLastError(None).decode()
    mine = {"count": four, "type": whole}.get(choice, five)
    return code, words, is_spoiled(mine.get())


@pytest.mark.parametrize("streams", ["inline", "async"])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("count", "all_reduce of 4 float32 values (sum)"),
        ("type", "all_reduce of 5 int32 values (sum)"),
        ("op", "all_reduce of 5 float32 values (max)"),
        ("collective", "broadcast of 5 float32 values from rank 1"),
    ],
)
def test_ranks_that_call_different_things(name, theirs, streams):
    for code, words, spoiled in nccl_ranks.run(calls, 2, name, streams=streams):
        assert code == INVALID_USAGE
        assert words.startswith("standin: NCCL: rank ")
        assert "all_reduce of 5 float32 values (sum)" in words and theirs in words
        assert spoiled


def has_other_root(meeting):
    communicator = meeting.join()
    communicator.broadcast(Buffer([1.0]), meeting.rank)


def test_ranks_with_different_roots():
    for code, words in nccl_ranks.run(has_other_root, 2):
        assert code == INVALID_USAGE
        assert "from rank 0" in words and "from rank 1" in words


def continues_after_a_failure(meeting):
    """After a failure each call fails; another communicator works."""
    communicator = meeting.join()
    with pytest.raises(NcclError):
        communicator.all_reduce(Buffer([1.0] * (1 + meeting.rank)))
    with pytest.raises(NcclError) as caught:
        communicator.all_reduce(Buffer([1.0]))
    assert caught.value.code == INVALID_USAGE
    communicator.abort()
    buffer = Buffer([1.0])
    meeting.join().all_reduce(buffer)
    return buffer.get()


def test_communicator_is_lost_after_a_failure():
    assert nccl_ranks.run(continues_after_a_failure, 2) == [[2.0]] * 2


def runs_two_graphs(meeting):
    """Launch two graphs on two streams at once, while the other rank has launched none."""
    communicator = meeting.join()
    library = nccl_ranks.library
    buffers, streams = [Buffer([1.0]), Buffer([1.0])], [Stream(), Stream()]
    launches = []
    for buffer, stream in zip(buffers, streams, strict=True):
        enqueue = functools.partial(communicator.all_reduce, buffer, stream=stream)
        launches.append((nccl_ranks.capture(stream, enqueue), stream))
    for executable, stream in launches if meeting.rank == 0 else []:
        assert library.cudaGraphLaunch(executable, stream) == 0
    error = communicator.wait_for_error()
    for buffer in buffers:
        buffer.get()
    return error, library.ncclGetLastError(None).decode()


def test_two_collectives_at_the_same_time():
    first, second = nccl_ranks.run(runs_two_graphs, 2, streams="async")
    assert first[0] == second[0] == INVALID_USAGE
    assert first[1].endswith("two streams use one communicator at the same time")


# --- Arguments


def refuses_arguments(meeting):
    communicator = meeting.join()
    buffer = Buffer([1.0] * 4)

    def all_reduce_of_type(number):
        two = nccl_ranks.ctypes.c_size_t(2)
        communicator.call("ncclAllReduce", buffer.address, buffer.address, two, number, SUM)

    cases = {
        "op": lambda: communicator.all_reduce(buffer, 77),
        "prod": lambda: communicator.all_reduce(buffer, PROD),
        "root": lambda: communicator.broadcast(buffer, 3),
        "type": lambda: all_reduce_of_type(50),
        "half": lambda: all_reduce_of_type(FLOAT16),
        "host": lambda: communicator.call(
            "ncclAllReduce",
            nccl_ranks.ctypes.create_string_buffer(16),
            buffer.address,
            nccl_ranks.ctypes.c_size_t(4),
            buffer.type,
            SUM,
        ),
        "end": lambda: communicator.call(
            "ncclAllReduce",
            buffer.address,
            buffer.address,
            nccl_ranks.ctypes.c_size_t(1 << 20),
            buffer.type,
            SUM,
        ),
    }
    words = {}
    for name, case in cases.items():
        with pytest.raises(NcclError) as caught:
            case()
        assert caught.value.code == INVALID_ARGUMENT
        words[name] = str(caught.value).removeprefix("standin: NCCL: ")
    communicator.destroy()
    with pytest.raises(NcclError) as caught:
        communicator.all_reduce(buffer)
    words["destroyed"] = str(caught.value).removeprefix("standin: NCCL: ")
    return words


def test_bad_arguments_are_refused():
    assert nccl_ranks.run(refuses_arguments, 1) == [
        {
            "op": "there is no operation 77",
            "prod": "all_reduce by prod is not implemented",
            "root": "broadcast with root 3 of 1 ranks",
            "type": "there is no data type 50",
            "half": "all_reduce of float16 is not implemented",
            "host": "all_reduce of 4 float32 values (sum): its input is not memory of a device",
            "end": "all_reduce of 1048576 float32 values (sum): its input of 4194304 bytes ends "
            "outside of its allocation",
            "destroyed": "a communicator that does not exist or was destroyed",
        }
    ]


def ends_no_group(meeting):
    nccl_ranks.check(nccl_ranks.library.ncclGroupEnd())


def test_group_without_a_start():
    [(code, words)] = nccl_ranks.run(ends_no_group, 1)
    assert (code, words) == (
        INVALID_USAGE,
        "standin: NCCL: ncclGroupEnd without ncclGroupStart",
    )


# --- Ranks that are gone


def dies(meeting):
    communicator = meeting.join()
    buffer = Buffer([1.0] * 100_000)
    communicator.all_reduce(buffer)
    buffer.get()
    if meeting.rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        communicator.all_reduce(buffer)
    except NcclError as error:
        code, words = error.code, str(error)
    else:
        code = communicator.wait_for_error()
        buffer.get()
        words = nccl_ranks.library.ncclGetLastError(None).decode()
    return code, words, time.monotonic() - start, is_spoiled(buffer.get())


@pytest.mark.parametrize("streams", ["inline", "async"])
def test_rank_that_died(streams):
    first, died, third = nccl_ranks.run(dies, 3, streams=streams)
    assert died == "died"
    for outcome in (first, third):
        code, words, seconds, spoiled = outcome
        assert code == REMOTE_ERROR and spoiled and seconds < 2
        assert "rank 1 (process " in words and words.endswith("has died")


def splits_without_rank_1(meeting):
    communicator = meeting.join()
    if meeting.rank == 1:
        os._exit(1)
    communicator.split(0, 0)


def test_split_without_a_rank_that_died():
    first, died, third = nccl_ranks.run(splits_without_rank_1, 3)
    assert died == "died"
    for code, words in (first, third):
        assert code == REMOTE_ERROR
        assert "waits in split for rank 1 (process " in words and words.endswith("has died")


# --- Abort


def aborts(meeting):
    """Rank 0 aborts its collective; rank 1 keeps waiting, until rank 0's process ends."""
    communicator = meeting.join()
    buffer = Buffer([1.0])
    outcome = []

    def all_reduce():
        try:
            communicator.all_reduce(buffer)
        except NcclError as error:
            outcome.append((error.code, str(error)))

    if meeting.rank == 1:
        communicator.all_reduce(buffer)
        meeting.hear("aborted")
        communicator.all_reduce(buffer)  # rank 0 has sent its values for this one
        start = time.monotonic()
        thread = threading.Thread(target=all_reduce)
        thread.start()
        thread.join(0.5)
        still_waits = thread.is_alive()
        meeting.tell("seen")
        thread.join()
        return still_waits, time.monotonic() - start < 3, outcome[0][0]
    communicator.all_reduce(buffer)
    thread = threading.Thread(target=all_reduce)
    thread.start()
    time.sleep(0.2)
    communicator.abort()
    thread.join()
    assert is_spoiled(buffer.get())
    assert outcome == [(INVALID_USAGE, "standin: NCCL: the communicator was aborted")]
    meeting.tell("aborted")
    meeting.hear("seen")
    os._exit(1)


def test_abort_ends_what_this_rank_waits_for():
    assert nccl_ranks.run(aborts, 2) == ["died", (True, True, REMOTE_ERROR)]
