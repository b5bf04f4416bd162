"""How ranks over NCCL come to the same number of passes again, after a failure.

Hosts do not wait for the sums, and each rank learns of a failure at some later pass. Then the ranks
align: each writes to the group's store how many passes it has made, and the ranks that are behind
abort passes until all have made as many.
"""

import contextlib
import time
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import _compat
from syncbn.distributed import collectives
from syncbn.distributed.collectives import Work
from syncbn.distributed.state import GroupState, states_over_nccl

# For ranks whose hosts are busy with other work and do not know of the failure yet.
_ALIGN_TIMEOUT = timedelta(seconds=5)
# For devices of other ranks that have not come to the aborted pass. Over NCCL a collective is only
# enqueued. If this rank's process ends, or destroys the group, NCCL drops unfinished collectives.
SEND_SECONDS = 5.0


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

    The devices of ranks that are ahead wait in the passes that the others abort. A ``timeout`` of
    None is the store's. If the others do not come, this rank makes no pass until they have come.
    Its other groups align before their next pass.
    """
    is_known, state.is_misaligned = state.is_misaligned, True
    if state.is_lost:
        return Alignment("", "this rank can take part in no collective any more")
    state.statuses.clear()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return Alignment("", "a graph is being captured")
    try:
        _write_stop(state, text)
        notes = state.store.read_stops(state.num_alignments, state.group.size(), timeout)
    except RuntimeError as error:
        return Alignment("", f"the group's store failed: {error}")
    stops = {rank: Stop.parse(note) for rank, note in notes.items()}
    cause = next((f"rank {rank}: {stop.text}" for rank, stop in stops.items() if stop.text), "")
    if not is_known:
        _stop_all(text or cause)
    lost = [rank for rank, stop in stops.items() if stop.num_passes < 0]
    absent = {*range(state.group.size())} - {*stops}
    if lost:
        return Alignment(cause, f"rank {lost[0]} can take part in no collective any more")
    if absent:
        return Alignment(cause, f"rank {min(absent)} does not know of it yet")
    ahead = max(stops.values())
    num_behind = ahead.num_passes - state.num_passes
    if num_behind > len(ahead.sizes) or len({stop.num_others for stop in stops.values()}) > 1:
        return Alignment(
            cause,
            "ranks have gone on to collectives that are not of SyncBatchNorm layers, such as "
            "those of DistributedDataParallel",
        )
    work = None
    for size in ahead.sizes[len(ahead.sizes) - num_behind :]:
        if size:
            work = collectives.start_sum(aborting_message(state, size, device), state.group)
    wait_until_sent(work, time.monotonic() + SEND_SECONDS)
    state.num_passes = ahead.num_passes
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
    num_passes, num_others = state.num_passes, 0
    with contextlib.suppress(RuntimeError):  # of a backend that does not count them
        device = collectives.likely_device(state.group)
        num_others = _compat.count_operations(state.group, device) - num_passes
    if state.is_lost:
        num_passes = -1
    stop = Stop(num_passes, num_others, [*state.sizes_sent], text).encode()
    number, rank = state.num_alignments, state.group.rank()
    state.store.write_stop(number, rank, stop, replaces=state.is_lost)


def wait_until_sent(work: Work | None, deadline: float) -> None:
    """Wait until a collective over NCCL is done, at most until the deadline.

    ``work.wait()`` would let the device wait instead of the host, and without a bound.
    """
    while work is not None and not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)


def aborting_message(state: GroupState, size: int, device: torch.device) -> Tensor:
    """Return a message that aborts a pass, for its count is NaN.

    On a device it is part of the largest one so far. :mod:`syncbn.distributed.negotiation` makes
    it, because a device that is full has no memory when it is needed.
    """
    with _compat.without_dispatch_modes(), torch.inference_mode(False):
        kept = state.aborting
        if (
            kept is None
            or kept.numel() < size
            or kept.device.type != device.type
            or device.index not in (None, kept.device.index)  # a device may lack a number
        ):
            kept = torch.empty(size, dtype=torch.float64, device=device)
            if not _compat.is_in_cuda_graph(kept):
                state.aborting = kept
        return kept[:size].fill_(torch.nan)  # again: a collective writes its result here
