"""Withdrawals: messages whose count is NaN, in place of those that other ranks wait for."""

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import _torch_private, agreement, collectives, devices, errors, reports
from syncbn.agreement import history_of
from syncbn.arguments import Arguments
from syncbn.collectives import ProcessGroup, Work
from syncbn.identity import Identity

__all__ = ["PATIENCE", "between_passes", "from_pass", "hear", "send", "settle"]

# For ranks whose host has heard nothing yet, as it is busy elsewhere.
PATIENCE = timedelta(seconds=5)


def from_pass(
    error: Exception,
    group: ProcessGroup | None,
    layer: Identity,
    input: object,
    arguments: Arguments | None,
) -> Exception:
    """Withdraw this rank from the pass of the others, which fail at once instead of waiting.

    Belongs to the code before the collective, never to the collective. An interrupt does not
    withdraw: it must not wait for the others.

    Returns:
        The error, with the layer and the rank in its words.
    """
    if group is not None:
        tensors = [] if arguments is None else list(arguments.vectors)
        known = [tensor for tensor in (*tensors, input) if isinstance(tensor, Tensor)]
        device = known[0].device if known else None
        channels = _count_channels(input, arguments)
        size = None if channels is None else agreement.size_of(channels)
        _finish(_start(error, group, size, device))
    return errors.with_layer_and_rank(error, layer, group)


def between_passes(error: Exception, groups: Iterable[ProcessGroup]) -> None:
    """Withdraw this rank from whatever the other ranks of these groups do next.

    Belongs to code between passes. Starts in all groups before it waits for any: the others may
    wait in any of them.
    """
    for started in [_start(error, group) for group in groups]:
        _finish(started)


class _Started(NamedTuple):
    group: ProcessGroup
    device: torch.device
    words: str
    work: Work | None
    hears_late: bool  # the others do


# Torch 2.15 refuses to compile code that looks at a group's devices.
@_torch_private.uncompiled
def _start(
    error: Exception,
    group: ProcessGroup,
    size: int | None = None,
    device: torch.device | None = None,
) -> _Started:
    """Tell why this rank withdraws, and start to do so; ``size`` as of a message, if known."""
    device = devices.of_statistics(collectives.likely_device(group, device))
    history = history_of(group)
    is_late = history.is_late(device)
    words, work, has_failed = "", None, False
    # An error in here must not hide that of the rank.
    with (
        _no_trace(),
        _torch_private.without_dispatch_modes(),
        contextlib.suppress(RuntimeError, ValueError),
    ):
        # Some rank has failed before, and waits in no pass for this one.
        has_failed = history.is_apart or history.noted() != 0
        if not has_failed:
            history.num_passes += 1
            words = reports.write_withdrawal(group, history, error)
            size = history.size_to_meet(size, words, group, device)
            history.sizes_sent.append(size)
            if size:
                work = collectives.start_sum(_message(size, device), group)
    history.forget()
    return _Started(group, device, words, work, is_late and (has_failed or work is not None))


@_torch_private.uncompiled
def _finish(started: _Started) -> None:
    """Wait until the others have heard that this rank withdraws."""
    group, device, words, work, hears_late = started
    with contextlib.suppress(RuntimeError, ValueError):
        if hears_late:
            settle(group, device, words)
        elif work is not None:
            work.wait()


# Ranks over NCCL, which hear of a failure when their hosts have gone on.


class Stop(NamedTuple):
    """How far the host of a rank had come when it heard of a failure, and why the rank failed."""

    num_passes: int
    num_others: int  # collectives in the group that are not of passes
    sizes: list[int]  # of the latest messages
    words: str

    @classmethod
    def parse(cls, text: bytes) -> "Stop":
        """Return what :meth:`encode` was made of."""
        numbers, others, sizes, words = text.decode().split(" ", 3)
        return cls(int(numbers), int(others), [int(size) for size in sizes.split(",")], words)

    def encode(self) -> str:
        """Return it as text, for the store."""
        sizes = ",".join(map(str, self.sizes))
        return f"{self.num_passes} {self.num_others} {sizes} {self.words}"


class Settled(NamedTuple):
    """What a rank learns from the others after a failure."""

    cause: str  # the error of a rank that has withdrawn, if any
    hindrance: str  # why not all ranks have made as many passes; empty if they have


def hear(group: ProcessGroup, device: torch.device) -> Settled:
    """Take note of the failure that operators on CUDA have noted."""
    history = history_of(group)
    if history.is_late(device):
        settled: Settled = settle(group, device)
        return settled
    for verdict in history.verdicts.values():
        verdict.clear()
    report = reports.read_withdrawal(group, history)  # all ranks have made as many passes
    return Settled("" if report is None else f"rank {report.rank}: {report.words}", "")


@_torch_private.uncompiled
def settle(
    group: ProcessGroup,
    device: torch.device,
    words: str = "",
    patience: timedelta | None = PATIENCE,
) -> Settled:
    """Have all ranks make as many passes, after a failure that they heard of at different ones.

    Each says how far it has come, and those that are behind send withdrawals, for which the devices
    of the others wait. Without ``patience`` the others have the time of the group's store. If they
    do not come, this rank makes no pass before they have.
    """
    history = history_of(group)
    history.is_apart = True
    for verdict in history.verdicts.values():
        verdict.clear()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return Settled("", "a graph is being captured")
    try:
        stops = _exchange_stops(group, device, words, patience)
    except RuntimeError as error:
        return Settled("", f"the group's store failed: {error}")
    cause = next((f"rank {r}: {stop.words}" for r, stop in stops.items() if stop.words), "")
    absent = {*range(group.size())} - {*stops}
    if absent:
        return Settled(cause, f"rank {min(absent)} has not heard of it yet")
    ahead = max(stops.values())
    num_behind = ahead.num_passes - history.num_passes
    if num_behind > len(ahead.sizes) or len({stop.num_others for stop in stops.values()}) > 1:
        return Settled(
            cause,
            "ranks have gone on to collectives that are not of SyncBatchNorm layers, such as "
            "those of DistributedDataParallel",
        )
    for size in ahead.sizes[len(ahead.sizes) - num_behind :]:
        if size:
            collectives.start_sum(_message(size, device), group)
    history.num_passes = ahead.num_passes
    history.num_settled += 1
    history.is_apart = False
    return Settled(cause, "")


def _exchange_stops(
    group: ProcessGroup, device: torch.device, words: str, patience: timedelta | None
) -> dict[int, Stop]:
    """Return the stops of the ranks that have come in time, by rank."""
    history, store = history_of(group), collectives.store_of(group)
    if store is None:
        raise RuntimeError("it has none")
    keys = [f"{history.prefix}/failure {history.num_settled}/{r}" for r in range(group.size())]
    if not store.check([keys[group.rank()]]):
        num_others = 0
        with contextlib.suppress(RuntimeError):  # of a backend that does not count them
            num_others = collectives.count_operations(group, device) - history.num_passes
        stop = Stop(history.num_passes, num_others, [*history.sizes_sent], words)
        store.set(keys[group.rank()], stop.encode())
    with contextlib.suppress(RuntimeError):  # the time has passed
        store.wait(keys, *([] if patience is None else [patience]))
    return {r: Stop.parse(store.get(key)) for r, key in enumerate(keys) if store.check([key])}


def _count_channels(input: object, arguments: Arguments | None) -> int | None:
    """Return the C of a layer's message, from parameters, buffers or the input."""
    if arguments is not None:
        if arguments.num_features is not None:
            return arguments.num_features
        for vector in arguments.vectors:
            if isinstance(vector, Tensor) and vector.dim() == 1:
                return vector.size(0)
    if isinstance(input, Tensor) and input.dim() > 1 and not input.is_nested:
        return input.size(1)
    return None


def send(group: ProcessGroup, size: int, device: torch.device) -> None:
    """Take part in the collective of the other ranks, with a withdrawal."""
    with contextlib.suppress(RuntimeError, ValueError):
        history_of(group).sum_messages(_message(size, device), group, "")


def _message(size: int, device: torch.device) -> Tensor:
    """Return a message with a count of NaN."""
    message = torch.zeros(size, dtype=torch.float64, device=device)
    message[-4] = torch.nan
    return message


@contextlib.contextmanager
def _no_trace() -> Iterator[None]:
    """Suspend torch.jit.trace, which refuses what it does not know."""
    state = _torch_private.jit_tracing_state()
    if state is None:  # where it cannot be set, as inside of an operator
        yield
        return
    _torch_private.set_jit_tracing_state(None)
    try:
        yield
    finally:
        _torch_private.set_jit_tracing_state(state)
