"""Agreement of a group's ranks on the passes that they make, before and in their one collective.

Ranks whose messages differ in size crash inside a collective (gloo) or hang (NCCL), and ranks that
make different passes of one size would add up what does not belong together. So:

- Each message ends with a fingerprint, a number for the pass: direction and layer. Where the sum of
  fingerprints is not the fingerprint times the number of ranks, ranks make different passes. All
  ranks see it at once.
- Each message also ends with a next size, the size of the message that its rank expects to send
  next: that which has followed this pass, if it was always the same. Where next sizes agree, a rank
  knows what the others are about to send. If it is to send another size itself, it says so in the
  group's store: all ranks may be about to turn that way together. If not all have said so within a
  second, it takes part in a collective of the expected size, with a fingerprint of its own. Then
  all ranks fail with words, or, if the others only were late, all go on.
- Where nothing is expected, as in the first step, the first rank to come writes its size to the
  group's store, and the others compare. That waits for no rank.

What follows a pass is remembered. So there is one collective each way, and nothing is sent to the
store, as soon as a program repeats itself. Not covered is a pass that has been followed by several
sizes: ranks that part there meet with different sizes.

Over NCCL the host does not wait for the sums, and each rank hears of a failure some passes later,
where its own host happens to be. So each then says in the store how far it has come, and those that
are behind send aborts until all have sent as many messages: aborts.settle.
"""

import contextlib
from collections import deque
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from syncbn import _compat, ops
from syncbn.distributed import collectives
from syncbn.distributed.collectives import ProcessGroup, Store
from syncbn.distributed.layer_id import ANONYMOUS, Identity

__all__ = [
    "STEP",
    "History",
    "Record",
    "Report",
    "Status",
    "another_pass",
    "channels_of",
    "check_not_destroyed",
    "check_sound",
    "describe",
    "history_of",
    "read_abort",
    "size_of",
    "write_abort",
]


# Their positions are part of the fingerprints.
STEP = "step of recompute_statistics"  # between its batches: no pass of a layer
_DIRECTIONS = ("forward", "recomputation", "backward", "double backward", STEP)
_OF_CHANNELS = _DIRECTIONS[:3]  # whose messages have sums of channels alone

# The next size where several sizes have followed: neither 0 nor a size: no rank expects it.
_SEVERAL = 1

# Store keys and records of programs that make new layers all the time stay bounded, and so do the
# requests in a first step: a store answers some 50,000 a second. Beyond, sizes are compared once.
_MAX_COMPARISONS = 1000
_MAX_RANKS = 1024
_MAX_RECORDS = 10_000
# Messages whose sizes are kept; a device queues no more than some thousand launches of its host.
_MAX_AHEAD = 4096

# For ranks that turn together: in a training they arrive within less.
_PATIENCE = timedelta(seconds=1)


class Report(NamedTuple):
    """What a rank does, as it tells others: the size and fingerprint of its message, and words.

    The fingerprint of a rank that has aborted is 0, and the words are those of its error; the size
    is 0 if it does not know which size others send.
    """

    size: int
    fingerprint: int
    rank: int
    words: str

    @classmethod
    def parse(cls, text: bytes) -> "Report":
        """Return what :meth:`encode` was made of."""
        size, fingerprint, rank, words = text.decode().split(" ", 3)
        return cls(int(size), int(fingerprint), int(rank), words)

    def encode(self) -> str:
        """Return it as text, for the store."""
        return " ".join(map(str, self))


class Record:
    """One direction of one layer: its fingerprint, and the sizes that have followed it."""

    __slots__ = ("direction", "fingerprint", "history", "layer", "next_size", "sizes")

    def __init__(self, history: "History", layer: Identity, direction: str) -> None:
        self.history, self.layer, self.direction = history, layer, direction
        self.fingerprint = float(8 * layer.number + _DIRECTIONS.index(direction) + 1)
        self.sizes: list[int] = []
        self.next_size = 0

    def follow(self, size: int) -> None:
        """Remember what has followed."""
        self.sizes.append(size)
        # Nothing is expected after the calls of a function, which may belong to any layer.
        if self.layer.key:
            self.next_size = size if len(self.sizes) == 1 else _SEVERAL

    @property
    def name(self) -> str:
        """The direction as a noun."""
        return _pass(self.direction)

    @property
    def label(self) -> str:
        """What profiles are to call it."""
        return f"syncbn {self.direction} {self.layer.name}".rstrip()

    def __str__(self) -> str:
        return _described(self.direction, self.layer)


class Status:
    """Where operators note that a pass on a CUDA device was not sound, and the host reads it."""

    def __init__(self, device: torch.device, waits: bool) -> None:
        pins = device.type == "cuda"
        self._device = device if pins and waits else None  # to be waited for
        self.note = torch.zeros(1, dtype=torch.float64, device="cpu", pin_memory=pins)
        self._zero = torch.zeros(1, dtype=torch.float64, device=device)
        self._cleared: torch.cuda.Event | None = None

    def read(self) -> float:
        """Return what has been noted; 0 if nothing has, or until the device has cleared it.

        Where the host waits for each sum, it waits here for the judgement of the last one: all
        ranks hear of it at the same pass.
        """
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        if self.note[0] == 0 or not (self._cleared is None or self._cleared.query()):
            return 0.0
        return self.note.item()

    def clear(self) -> None:
        """Forget what has been noted, and what the passes will note that the device still has."""
        if not self._zero.is_cuda or torch.cuda.is_current_stream_capturing():
            self.note.zero_()
            return
        self.note.copy_(self._zero, non_blocking=True)
        self._cleared = torch.cuda.current_stream(self._zero.device).record_event()


def _spread(number: int) -> int:
    """Return a number of 32 bits, of which sums over two million ranks are exact in float64."""
    return number * 2654435761 % 2**32


class History:
    """The passes that this rank has made in a group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.prefix = f"syncbn/{_number_of(group)}"
        self.records: dict[tuple[int, int, str], Record] = {}
        self.registered = _compat.is_registered(group)
        self.adds_up = collectives.adds_up(group)
        self.labels = collectives.is_debugging()
        self.sum_messages = collectives.sum_function(group)
        self.num_passes = 0
        self.size = 0  # of this rank's message
        backend = collectives.cuda_backend(group)
        # Gloo adds up on the CPU: the host waits in a sum of CUDA tensors.
        self.waits_for_cuda = backend == "gloo"
        self.num_judged = group.size()  # ranks, in the pass that a status is of
        self.num_comparisons = 0
        self.sizes_compared: set[int] = set()
        self.statuses: dict[torch.device, Status] = {}
        # Keys of the store that this rank has written, with the number of the pass.
        self.keys: deque[tuple[int, str]] = deque()
        # Whether this rank may be passes ahead of another that has yet to read them, as over NCCL.
        self.keeps_keys = backend not in ("", "gloo")
        # For aborts.settle, over NCCL.
        self.sizes_sent: deque[int] = deque(maxlen=_MAX_AHEAD)
        self.num_settled = 0
        self.is_apart = False  # ranks may have sent different numbers of messages
        self.num_failures = 0
        # For groups.group_of_size: this rank's group of neighbors by size, weak because the group
        # may be this one; and how often all ranks have compared a size.
        self.neighbors: WeakValueDictionary[int, ProcessGroup] = WeakValueDictionary()
        self.num_sizes_compared = 0
        self.forget()

    def forget(self) -> None:
        """Expect nothing: after a failure ranks may go on at different places."""
        self.num_failures += 1  # the first is this history's beginning
        self.last = Record(self, ANONYMOUS, "forward")
        self.next_size_sent = 0  # as it was sent
        self.totals: Tensor | None = None

    def compare_anew(self) -> None:
        """Compare in the store what follows, however much has been compared there before."""
        self.num_comparisons = 0

    def record(self, layer: Identity, direction: str) -> Record:
        """Return the record of a pass, for its fingerprint and next_size."""
        key = (layer.key, layer.number, direction)
        found = self.records.get(key)
        if found is None:
            if len(self.records) >= _MAX_RECORDS:
                self.records.clear()
            found = self.records[key] = Record(self, layer, direction)
        return found

    def status(self, device: torch.device) -> Status:
        """Return the status on passes on this CUDA device."""
        status = self.statuses.get(device)
        if status is None:
            status = self.statuses[device] = Status(device, self.waits_for_cuda)
        return status

    def noted(self) -> float:
        """Return a status that the device has found and nobody has told yet; 0 if there is none.

        It is the sum of the fingerprints of the pass, negative if a rank has aborted it.
        """
        return next((found for v in self.statuses.values() if (found := v.read())), 0.0)

    def is_late(self, device: torch.device) -> bool:
        """Whether the host goes on before the sums on this device are known, as over NCCL."""
        return device.type == "cuda" and not self.waits_for_cuda

    def enter(
        self, record: Record, size: int, group: ProcessGroup, device: torch.device
    ) -> Report | None:
        """Find out, as far as can be, whether the other ranks are to send messages of this size.

        Called by each rank before its collective.

        Returns:
            What another rank does instead, for this rank to abort it.

        Raises:
            PassesDifferError, AbortedError: Another rank does something else, and has heard that
                this one does.
            RuntimeError: The ranks cannot talk to each other.
        """
        self.num_passes += 1
        self.size = size
        self.sizes_sent.append(size)
        last, next_size, other = self.last, record.next_size, None
        if size not in last.sizes:
            # A mode, such as selective checkpointing's, must not see what only the first pass does.
            with _compat.without_dispatch_modes():
                expected = self._expected()
                if expected == 0:
                    other = self._compare_in_store(record, group, device)
                elif expected != size and not self._all_turn(record, group, device):
                    self._turn(record, expected, group, device)
            if other is None:
                last.follow(size)
        self.last, self.totals = record, None
        self.next_size_sent = next_size
        return other

    def sum_of(self, number: float, group: ProcessGroup) -> float:
        """Return what the ranks' numbers add up to if all of them send this one."""
        return number * group.size() if self.adds_up else number

    def hear(self, record: Record, totals: Tensor) -> None:
        """Keep the sums of a pass, whose end tells what the ranks expect, but on CUDA."""
        if self.last is record and not totals.is_cuda and type(totals) is Tensor:
            self.totals = totals

    def size_to_meet(
        self, size: int | None, words: str, group: ProcessGroup, device: torch.device
    ) -> int:
        """Find out where a rank that cannot make its next pass meets the others.

        ``size`` is that of the message that it would have sent, or None if it does not know.

        Returns:
            The size of the message that the others send or are to send; 0 if none can be met.
        """
        if size is None or size not in self.last.sizes:
            expected = self._expected()
            if expected:
                return expected
            first = self._write_first(Report(size or 0, 0, group.rank(), words), group, device)
            if first is not None:
                return first.size
        return size or 0

    def _expected(self) -> int:
        """Return the size that is expected to come next; 0 if none is, or ranks expect several.

        Ranks may expect nothing while others do, as after they have made a layer anew. If all other
        k ranks expect s, the sums of next_sizes and of their squares are k s and k s².
        """
        if self.totals is None:
            return 0
        next_sizes, squares = self.totals[-2:].tolist()
        if next_sizes == 0 or squares % next_sizes != 0 or next_sizes**2 % squares != 0:
            return 0
        expected = int(squares / next_sizes)
        return expected if expected != _SEVERAL and self.next_size_sent in (0, expected) else 0

    def report(self, record: Record, group: ProcessGroup) -> Report:
        """Return what this rank does."""
        words = f"runs {record}"
        if record.direction in _OF_CHANNELS:
            words += f" with {channels_of(self.size)} channels"
        return Report(self.size, int(record.fingerprint), group.rank(), words)

    def _all_turn(self, record: Record, group: ProcessGroup, device: torch.device) -> bool:
        """Ask the store whether all ranks are to send this message, other than was expected.

        Waits a moment for the others, who may as well wait in the collective of what was expected.
        """
        found = self._store_and_key(group, device)
        if found is None or self.num_comparisons > _MAX_COMPARISONS:
            return False
        store, key = found
        decision = f"{key}/all turn"
        self.remember_key(f"{key}/{record.fingerprint:.0f} {self.size}", store)
        self.remember_key(decision, store)
        if store.add(f"{key}/{record.fingerprint:.0f} {self.size}", 1) == group.size():
            return bool(store.compare_set(decision, "", "yes") == b"yes")
        with contextlib.suppress(RuntimeError):  # the time has passed
            store.wait([decision], _PATIENCE)
        return bool(store.compare_set(decision, "", "no") == b"yes")

    def _turn(
        self, record: Record, expected: int, group: ProcessGroup, device: torch.device
    ) -> None:
        """Agree with all ranks to send messages of another size than is expected."""
        message = torch.zeros(expected, dtype=torch.float64, device=device)
        fingerprint = float(_spread(_spread(self.size) + int(record.fingerprint)))
        message[-3] = fingerprint
        totals = self.sum_messages(message, group, "")
        check_sound(totals, self.sum_of(fingerprint, group))

    def _compare_in_store(
        self, record: Record, group: ProcessGroup, device: torch.device
    ) -> Report | None:
        many = self.num_comparisons >= _MAX_COMPARISONS or group.size() > _MAX_RANKS
        if many and self.size in self.sizes_compared:
            return None
        self.sizes_compared.add(self.size)
        first = self._write_first(self.report(record, group), group, device)
        return None if first is None or first.size == self.size else first

    def _write_first(
        self, report: Report, group: ProcessGroup, device: torch.device
    ) -> Report | None:
        """Write a report to the store if this rank is the first to come; return what is there.

        Returns:
            None where there is no place to meet.
        """
        found = self._store_and_key(group, device)
        if found is None:
            return None
        store, key = found
        self.remember_key(key, store)
        return Report.parse(store.compare_set(key, "", report.encode()))

    def remember_key(self, key: str, store: Store) -> None:
        """Note a key that this pass writes, and remove those of passes that all ranks have left.

        This rank has left the collective of the last pass, so all ranks have left the pass before.
        """
        if self.keeps_keys:
            return
        while self.keys and self.keys[0][0] < self.num_passes - 1:
            with contextlib.suppress(RuntimeError):  # of stores that cannot
                store.delete_key(self.keys.popleft()[1])
        self.keys.append((self.num_passes, key))

    def _store_and_key(self, group: ProcessGroup, device: torch.device) -> tuple[Store, str] | None:
        """Return the group's store and the place in it where the ranks meet next.

        They meet if they have made the same number of passes, and their backends the same number of
        operations. Sends between some ranks make the latter differ; such ranks find only what they
        wrote.

        Returns:
            None where the group has no store or does not count its operations.
        """
        self.num_comparisons += 1
        try:
            number = collectives.count_operations(group, device)
        except RuntimeError:
            return None
        store = collectives.store_of(group)
        return None if store is None else (store, f"{self.prefix}/{number}/{self.num_passes}")


def describe(fingerprint: int, history: History) -> str:
    """Return the text for a pass of this rank in the group, by its fingerprint."""
    number, place = divmod(fingerprint, 8)
    layers = (record.layer for record in history.records.values())
    layer = next((layer for layer in layers if layer.number == number), ANONYMOUS)
    return _described(_DIRECTIONS[place - 1], layer)


def _described(direction: str, layer: Identity) -> str:
    return f"the {_pass(direction)}" + ("" if direction == STEP else f" of {layer}")


def _pass(direction: str) -> str:
    return direction if direction in ("recomputation", STEP) else f"{direction} pass"


def check_sound(totals: Tensor, fingerprint_sum: float) -> None:
    """Check that the ranks' fingerprints add up to ``fingerprint_sum`` and that none has aborted.

    Raises:
        PassesDifferError, AbortedError: As the operators would.
    """
    count, found, *_ = totals[-4:].tolist()
    if count != count:
        raise ops.AbortedError
    if found != fingerprint_sum:
        raise ops.PassesDifferError


def channels_of(size: int) -> int:
    """Return the C of a message of this size."""
    return (size - 4) // 2


def size_of(channels: int) -> int:
    """Return the size of a message of C channels."""
    return 2 * channels + 4


def same_channels(first: Report, second: Report) -> bool:
    """Whether two ranks make passes of as many channels, as far as their messages' sizes tell."""
    of_channels = first.fingerprint % 8 <= len(_OF_CHANNELS)
    return first.fingerprint != second.fingerprint or first.size == second.size or not of_channels


# Compilers, which trace on behind a break of their graph, refuse code that touches a group's store.
@_compat.uncompiled
def _number_of(group: ProcessGroup) -> int:
    """Return how many groups of this rank have had the group's store, this one included."""
    with contextlib.suppress(RuntimeError):
        store = collectives.store_of(group)
        if store is not None:
            return int(store.add(f"syncbn/groups of rank {group.rank()}", 1))
    return 0


_histories: WeakKeyDictionary[ProcessGroup, History] = WeakKeyDictionary()


def history_of(group: ProcessGroup) -> History:
    """Return the history of a group, for as long as the group lives."""
    history = _histories.get(group)
    if history is None:
        history = _histories[group] = History(group)
    return history


def check_not_destroyed(group: ProcessGroup) -> None:
    """Raise ValueError if torch.distributed has made the group and destroyed it since."""
    if history_of(group).registered and not _compat.is_registered(group):
        raise collectives.destroyed(group.rank(), group.group_name)


_MAX_CHARACTERS = 1000
# All ranks come out of the same collective, but some may be busy.
_PATIENCE = timedelta(seconds=5)


def write_abort(group: ProcessGroup, history: History, error: BaseException) -> str:
    """Tell why this rank aborts, before it does; return the words."""
    words = f"{type(error).__name__}: {str(error)[:_MAX_CHARACTERS]}"
    store = collectives.store_of(group)
    if store is not None:
        with contextlib.suppress(RuntimeError):
            report, key = Report(0, 0, group.rank(), words), _key(history, "aborted")
            history.remember_key(key, store)
            store.compare_set(key, "", report.encode())
    return words


def read_abort(group: ProcessGroup, history: History) -> Report | None:
    """Return why a rank has aborted; None if that is not known."""
    store, key = collectives.store_of(group), _key(history, "aborted")
    with contextlib.suppress(RuntimeError):
        if store is not None and store.check([key]):
            return Report.parse(store.get(key))
    return None


def another_pass(group: ProcessGroup, history: History, record: Record) -> Report | None:
    """Return what a rank does that does not do the same as this one; None if not known.

    All ranks call this. The first to come writes what it does, the first that does something else
    writes that, and each reads what is not its own.
    """
    mine, store = history.report(record, group), collectives.store_of(group)
    if store is None:
        return None
    with contextlib.suppress(RuntimeError):
        key, second = _key(history, "first"), _key(history, "second")
        history.remember_key(key, store)
        history.remember_key(second, store)
        first = Report.parse(store.compare_set(key, "", mine.encode()))
        if (first.size, first.fingerprint) != (mine.size, mine.fingerprint):
            store.compare_set(second, "", mine.encode())
            return first
        store.wait([second], _PATIENCE)
        return Report.parse(store.get(second))
    return None


def _key(history: History, word: str) -> str:
    return f"{history.prefix}/pass {history.num_passes}/{word}"
