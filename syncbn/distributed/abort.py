"""Aborted passes: a rank that fails makes the other ranks of its group fail soon.

The rank takes part in the collective that the others wait in, with a count of NaN. Over NCCL, hosts
do not wait for the sums, and each rank learns of a failure at some later pass. Then the ranks
align: each writes how many passes it has made, and the ranks that are behind abort passes until all
have made as many.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch

from syncbn import _compat
from syncbn.distributed import collectives
from syncbn.distributed.collectives import ProcessGroup, Work
from syncbn.distributed.protocol import GroupState, group_state, states_over_nccl

# For ranks whose hosts are busy with other work and do not know of the failure yet.
_ALIGN_TIMEOUT = timedelta(seconds=5)
# For devices of other ranks that have not come to the aborted pass. Over NCCL a collective is only
# enqueued. If this rank's process ends, or destroys the group, NCCL drops unfinished collectives.
_SEND_SECONDS = 5.0


def abort_pass(
    error: Exception, state: GroupState, size: int | None, device: torch.device | None
) -> None:
    """Abort the pass that this rank is to make, so that the others fail and do not wait.

    ``size`` and ``device`` are those of the message that it would have sent, if known.
    """
    _finish(_start(error, state, size, device))


def abort_next_pass(error: Exception, groups: Iterable[ProcessGroup]) -> None:
    """Abort whichever pass the other ranks of these groups make next.

    Starts in all groups before it waits for any: the others may wait in any of them.
    """
    for started in [_start(error, group_state(group), None, None) for group in groups]:
        _finish(started)


class _Started(NamedTuple):
    state: GroupState
    device: torch.device
    text: str  # of the error
    work: Work | None
    aligns: bool  # whether the other ranks align once they know


# Torch 2.15 refuses to compile code that looks at a group's devices.
@_compat.uncompiled
def _start(
    error: Exception, state: GroupState, size: int | None, device: torch.device | None
) -> _Started:
    """Write the reason to the store, and start the collective of the pass."""
    device = collectives.likely_device(state.group, device)
    text, work, has_failed = "", None, False
    # No error in here may hide the rank's own, or keep it from the others.
    with _no_trace(), _compat.without_dispatch_modes():
        with contextlib.suppress(RuntimeError):  # a failed device cannot tell
            # After an earlier failure no rank waits in this pass.
            has_failed = state.is_misaligned or state.read_statuses() != 0
        if not has_failed:
            state.store.num_passes += 1
            text = state.report_abort(error)
            with contextlib.suppress(RuntimeError, ValueError):  # of a store that fails
                size = state.size_to_abort(size, text, device)
            state.sizes_sent.append(size or 0)
            work = _send_abort(state, size, device, text) if size else None
    state.forget()
    aligns = state.is_asynchronous(device) and (has_failed or work is not None)
    return _Started(state, device, text, work, aligns)


@_compat.uncompiled
def _finish(started: _Started) -> None:
    """Wait until the others know that this rank aborts the pass."""
    deadline = time.monotonic() + _SEND_SECONDS
    with contextlib.suppress(RuntimeError, ValueError):
        if started.aligns:
            align(started.state, started.device, started.text)
            _wait_until_sent(started.work, deadline)
        elif started.work is not None:
            started.work.wait()


def take_part(state: GroupState, size: int, device: torch.device, text: str) -> None:
    """Take part in the collective of the other ranks, which aborts it."""
    with contextlib.suppress(RuntimeError, ValueError):
        work = _send_abort(state, size, device, text)
        if state.is_asynchronous(device):
            _wait_until_sent(work, time.monotonic() + _SEND_SECONDS)
        elif work is not None:
            work.wait()


def _send_abort(state: GroupState, size: int, device: torch.device, text: str) -> Work | None:
    """Start the collective of a pass that this rank aborts."""
    try:
        return collectives.start_sum(state.aborting_message(size, device), state.group)
    except Exception:  # of a group of any class, or of a device that has failed
        if state.is_asynchronous(device):
            leave(text)
        return None


def _wait_until_sent(work: Work | None, deadline: float) -> None:
    """Wait until a collective over NCCL is done, at most until the deadline.

    ``work.wait()`` would let the device wait instead of the host, and without a bound.
    """
    while work is not None and not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)


@contextlib.contextmanager
def _no_trace() -> Iterator[None]:
    """Suspend torch.jit.trace, which refuses calls that it does not know."""
    state = _compat.jit_tracing_state()
    if state is None:  # where it cannot be set, as inside of an operator
        yield
        return
    _compat.set_jit_tracing_state(None)
    try:
        yield
    finally:
        _compat.set_jit_tracing_state(state)


# Over NCCL.


class Stop(NamedTuple):
    """The pass that the host of a rank had come to when it learned of a failure."""

    num_passes: int  # -1 of a rank that can make no more
    num_others: int  # collectives in the group that are not of passes
    sizes: list[int]  # of the latest messages
    text: str  # the error of a rank that failed by itself, or empty

    @classmethod
    def parse(cls, encoded: str) -> "Stop":
        """Return the stop that :meth:`encode` has encoded."""
        numbers, others, sizes, text = encoded.split(" ", 3)
        return cls(int(numbers), int(others), [*map(int, filter(None, sizes.split(",")))], text)

    def encode(self) -> str:
        """Return the stop as text, for the store."""
        sizes = ",".join(map(str, self.sizes))
        return f"{self.num_passes} {self.num_others} {sizes} {self.text}"


class Alignment(NamedTuple):
    """The result of :func:`align`."""

    cause: str  # the rank that failed by itself and its error; empty if not known
    hindrance: str  # why the ranks have not made as many passes; empty if they have


@_compat.uncompiled
def align(
    state: GroupState,
    device: torch.device,
    text: str = "",
    timeout: timedelta | None = _ALIGN_TIMEOUT,
) -> Alignment:
    """Bring all ranks to the same number of passes, after a failure that they learned of late.

    Each writes how many passes it has made, and ranks that are behind abort passes, because the
    devices of the others wait in them. A ``timeout`` of None is the store's. If the others do not
    come, this rank makes no pass until they have come. Its other groups align before their next
    pass.
    """
    is_known, state.is_misaligned = state.is_misaligned, True
    if state.is_lost:
        return Alignment("", "this rank can take part in no collective any more")
    state.clear_statuses()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return Alignment("", "a graph is being captured")
    try:
        _write_stop(state, text)
        notes = state.store.read_stops(state.num_alignments, state.num_ranks, timeout)
    except RuntimeError as error:
        return Alignment("", f"the group's store failed: {error}")
    stops = {rank: Stop.parse(note) for rank, note in notes.items()}
    cause = next((f"rank {rank}: {stop.text}" for rank, stop in stops.items() if stop.text), "")
    if not is_known:
        _stop_all(text or cause)
    lost = [rank for rank, stop in stops.items() if stop.num_passes < 0]
    absent = {*range(state.num_ranks)} - {*stops}
    if lost:
        return Alignment(cause, f"rank {lost[0]} can take part in no collective any more")
    if absent:
        return Alignment(cause, f"rank {min(absent)} does not know of it yet")
    ahead = max(stops.values())
    num_behind = ahead.num_passes - state.store.num_passes
    if num_behind > len(ahead.sizes) or len({stop.num_others for stop in stops.values()}) > 1:
        return Alignment(
            cause,
            "ranks have gone on to collectives that are not of SyncBatchNorm layers, such as "
            "those of DistributedDataParallel",
        )
    work = None
    for size in ahead.sizes[len(ahead.sizes) - num_behind :]:
        if size:
            work = collectives.start_sum(state.aborting_message(size, device), state.group)
    _wait_until_sent(work, time.monotonic() + _SEND_SECONDS)
    state.store.num_passes = ahead.num_passes
    state.num_alignments += 1
    state.is_misaligned = False
    state.forget()
    return Alignment(cause, "")


def leave(text: str) -> None:
    """Tell all ranks that this one can take part in no collective any more, and why."""
    for state in states_over_nccl():
        state.is_lost = True
    _stop_all(text)


def _stop_all(text: str) -> None:
    """Have the ranks of all groups over NCCL align before their next pass.

    After a failure in one group, its ranks may make different numbers of passes in the others.
    """
    for state in states_over_nccl():
        if not state.is_misaligned or state.is_lost:
            state.is_misaligned = True
            with contextlib.suppress(RuntimeError):  # of a store that fails
                _write_stop(state, text)


def _write_stop(state: GroupState, text: str) -> None:
    """Write to the store where this rank stands."""
    num_passes, num_others = state.store.num_passes, 0
    with contextlib.suppress(RuntimeError):  # of a backend that does not count them
        device = collectives.likely_device(state.group)
        num_others = _compat.count_operations(state.group, device) - num_passes
    if state.is_lost:
        num_passes = -1
    stop = Stop(num_passes, num_others, [*state.sizes_sent], text).encode()
    number, rank = state.num_alignments, state.group.rank()
    state.store.write_stop(number, rank, stop, replaces=state.is_lost)
