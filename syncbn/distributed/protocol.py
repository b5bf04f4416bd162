"""How the ranks of a group make sure that they make the same pass, with one collective.

Ranks whose messages differ in size crash inside a collective (gloo) or hang (NCCL), and ranks that
make different passes of one size would add up unrelated sums. So:

- Each message ends with a fingerprint, a number for the pass: direction and layer. If the sum of
  the fingerprints is not the fingerprint times the number of ranks, ranks make different passes.
  All ranks see it at once. Fingerprints are hashes: no few of them add up to another one by chance.
  Layers of one name, or without a name, have the same ones.
- Each message also ends with a next size, the size of the message that its rank expects to send
  next: the size that has followed this pass, if it was always the same. If all next sizes agree, a
  rank knows the size that the others are about to send. A rank that is to send another size writes
  that to the group's store, because all ranks may switch to the size together. If not all ranks
  have written it within a second, the rank takes part in a collective of the expected size, with a
  special fingerprint. Then all ranks raise an error or, if the others were only late, all go on.
- If nothing is expected, as in the first step, the first rank to come writes its size to the
  group's store, and the others compare. No rank waits for another one.

Each rank remembers the size that has followed a pass. So as soon as a program repeats itself, there
is one collective each way, and nothing is sent to the store. One case is not covered: if several
sizes have followed a pass, ranks that diverge there meet with different sizes.
"""

import copy
from collections import deque
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor

from syncbn import _compat, ops
from syncbn.distributed import collectives
from syncbn.distributed.collectives import GroupReference, ProcessGroup
from syncbn.distributed.device_status import DeviceStatus, has_come
from syncbn.distributed.layer_id import ANONYMOUS, Identity, digest
from syncbn.distributed.store import GroupStore, PassReport, text_of

# Their positions are part of the fingerprints.
STEP = "step of recompute_statistics"  # between its batches: no pass of a layer
_DIRECTIONS = ("forward", "recomputation", "backward", "double backward", STEP)
_OF_CHANNELS = _DIRECTIONS[:3]  # whose messages are sums of channels

# The next size after which several sizes have followed: neither 0 nor the size of a message.
_SEVERAL = 1

# Bounds of the store keys and records of a program that makes new layers all the time, and of the
# requests in a first step: a store answers some 50,000 a second. Beyond them, each size is compared
# once.
_MAX_COMPARISONS = 1000
_MAX_RANKS = 1024
_MAX_RECORDS = 10_000
_MAX_POSITION = 255  # of calls of sync_batch_norm(); all later ones share a record
# Messages whose sizes are kept; a device queues no more than some thousand launches of its host.
_MAX_AHEAD = 4096
# For a device that has yet to come to the last sums, when its rank fails: it must not wait without
# a bound, because a rank that has failed earlier may be missing in them.
_DEVICE_SECONDS = 5.0


class PassRecord:
    """One direction of one layer in a group: its fingerprint, and the sizes that have followed."""

    __slots__ = ("_tail", "direction", "end", "fingerprint", "layer", "next_size", "sizes", "state")

    def __init__(self, state: "GroupState", layer: Identity, direction: str) -> None:
        # A copy of the layer's identity, whose end is also the record's.
        self.state, self.layer, self.direction = state, copy.copy(layer), direction
        self.end: ref[Identity] | None = None
        hashed = digest(layer.number, direction)
        self.fingerprint = float(8 * hashed + _DIRECTIONS.index(direction) + 1)
        # The sizes of the messages that have followed.
        self.sizes: list[int] = []
        # The size that is expected to follow; 0 if none is, _SEVERAL if several have followed.
        self.next_size = 0
        # Kept for the next pass; None until it is made.
        self._tail: Tensor | None = None

    def add_size(self, size: int) -> None:
        """Remember the size of the message that has followed."""
        self.sizes.append(size)
        self.next_size = size if len(self.sizes) == 1 else _SEVERAL
        self._tail = None

    @property
    def fingerprint_sum(self) -> float:
        """The sum of the ranks' fingerprints, if all of them make this pass."""
        return self.state.sum_of(self.fingerprint)

    @property
    def tail(self) -> Tensor:
        """Fingerprint, next size and its square: float64 [3] on the CPU, the end of a message."""
        if self._tail is not None and _compat.num_dispatch_modes() == 0:
            return self._tail
        numbers = [self.fingerprint, self.next_size, self.next_size**2]
        if _compat.is_faking():
            return torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if self._tail is None:
            with _compat.without_dispatch_modes(), torch.inference_mode(False):
                self._tail = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return self._tail

    @property
    def name(self) -> str:
        """The direction as a noun."""
        direction = self.direction
        return direction if direction in ("recomputation", STEP) else f"{direction} pass"

    @property
    def label(self) -> str:
        """The name of the collective in profiles."""
        return f"syncbn {self.direction} {self.layer.name}".rstrip()

    def __str__(self) -> str:
        return f"the {self.name}" + ("" if self.direction == STEP else f" of {self.layer}")


class GroupState:
    """The state of a process group on this rank: the passes made in it, and the expected ones."""

    def __init__(self, group: ProcessGroup) -> None:
        backend = collectives.cuda_backend(group)
        # Weak: the state exists for as long as the group does.
        self._group = ref(group)
        # For graphs of autograd; None if the reference would keep the group alive.
        self.reference = GroupReference(group) if _compat.is_registered(group) else None
        # A rank over NCCL may be passes ahead of another.
        self.is_over_nccl = backend not in ("", "gloo")
        self.store = GroupStore(group, keeps_keys=self.is_over_nccl)
        # The records by key and number of their layer, and by direction; those of calls of
        # sync_batch_norm() by the position of the call.
        self._records: dict[tuple[int, int, str], PassRecord] = {}
        # Whether torch.distributed has made the group, which it may destroy.
        self.is_registered = _compat.is_registered(group)
        # Whether the group's collectives compute; those of torch's fake backend do not.
        self._adds_up = collectives.adds_up(group)
        # Whether profiles show the names of passes.
        self.has_labels = collectives.is_debugging()
        # The last pass, the number of passes since the last change between forward passes and
        # others, the next size that this rank sent, and the sums.
        self.last = PassRecord(self, ANONYMOUS, "forward")
        self._num_in_row = 0
        self.next_size_sent = 0
        self._totals: Tensor | None = None
        # The size of this rank's message.
        self.size = 0
        # How often sizes were compared in the store, and the sizes that were.
        self.num_comparisons = 0
        self._sizes_compared: set[int] = set()
        # How often the ranks may have gone on at different passes, the start included.
        self.num_failures = 1
        # For groups.group_of_size: this rank's group of neighbors by size, weak because the group
        # may be this one; and how often all ranks have compared a size.
        self.neighbors: WeakValueDictionary[int, ProcessGroup] = WeakValueDictionary()
        self.num_sizes_compared = 0

        # CUDA: gloo adds up on the CPU, so that the host waits in the sum of CUDA tensors.
        self.waits_for_cuda = backend == "gloo"
        self.statuses: dict[torch.device, DeviceStatus] = {}
        # The number of fingerprints in the sum that a status is about.
        self.num_verified = group.size()
        # NCCL: sizes of the latest messages, how often ranks have aligned, see abort.align,
        # whether they may have made different numbers of passes, and whether this rank can make
        # no more.
        self.sizes_sent: deque[int] = deque(maxlen=_MAX_AHEAD)
        self.num_alignments = 0
        self.is_misaligned = self.is_lost = False
        # A message of NaN, see aborting_message.
        self._aborting: Tensor | None = None

    @property
    def group(self) -> ProcessGroup:
        """The group."""
        group = self._group()
        assert group is not None  # whoever has the state has the group
        return group

    @property
    def num_ranks(self) -> int:
        """The size of the group, which may change."""
        return self.group.size()

    def is_destroyed(self) -> bool:
        """Whether torch.distributed has made the group and destroyed it since."""
        return self.is_registered and not _compat.is_registered(self.group)

    def record(self, layer: Identity, direction: str) -> PassRecord:
        """Return the record of a pass."""
        number = layer.number if layer.key else self._position(direction)
        key = (layer.key, number, direction)
        found = self._records.get(key)
        if found is None:
            if len(self._records) >= _MAX_RECORDS:
                self._records.clear()
            found = self._records[key] = PassRecord(self, layer, direction)
            if layer.key > 0:  # else it is made for each pass, from a name in a graph
                records = self._records
                found.end = ref(layer, lambda _: records.pop(key, None))
        return found

    def _position(self, direction: str) -> int:
        """Return how many passes precede a pass in the same half of a step, or the bound."""
        is_same_half = (direction == "forward") == (self.last.direction == "forward")
        return min(self._num_in_row, _MAX_POSITION) if is_same_half else 0

    def describe(self, fingerprint: int) -> str:
        """Return the pass of a fingerprint, which this rank has made, as text."""
        records = [*self._records.values()]  # of which some may end meanwhile
        made = (str(r) for r in records if round(r.fingerprint) == fingerprint)
        return next(made, "an earlier pass")

    def forget(self) -> None:
        """Expect nothing: after a failure ranks may go on at different passes."""
        self.num_failures += 1
        self.last = PassRecord(self, ANONYMOUS, "forward")
        self._num_in_row = 0
        self.next_size_sent = 0
        self._totals = None

    def forget_records(self) -> None:
        """Expect nothing, and forget the sizes that have followed each pass."""
        self._records.clear()
        self.forget()

    # The sum of a pass.

    def enter(self, record: PassRecord, size: int, device: torch.device) -> PassReport | None:
        """Compare the size of this rank's message with the other ranks', before the collective.

        A difference is not always found: see the head of this file.

        Returns:
            The report of a rank that makes another pass, whose collective this rank is to abort.

        Raises:
            PassesDifferError, AbortedError: Another rank makes another pass and knows that this one
                does.
            RuntimeError: The ranks cannot communicate.
        """
        self.store.num_passes += 1
        self.size = size
        self.sizes_sent.append(size)
        last, next_size, other = self.last, record.next_size, None
        if size not in last.sizes:
            # A dispatch mode, as of selective checkpointing, must see the same calls in each pass.
            with _compat.without_dispatch_modes():
                if device.type != "cpu" and not _compat.is_faking():
                    self.aborting_message(size, device)
                expected = self._expected()
                if expected == 0:
                    other = self._compare(record, device)
                elif expected != size and not self._all_switch(record, device):
                    self._switch_size(record, expected, device)
            if other is None:
                last.add_size(size)
        self._num_in_row = self._position(record.direction) + 1
        self.last, self._totals = record, None
        self.next_size_sent = next_size
        return other

    def keep_totals(self, totals: Tensor, record: PassRecord) -> None:
        """Keep the sums of a pass, whose tail holds the next sizes; not those of a CUDA graph."""
        if self.last is record and type(totals) is Tensor:
            self._totals = None if _compat.is_in_cuda_graph(totals) else totals

    def sum_of(self, number: float) -> float:
        """Return the sum of the ranks' numbers, if all of them send this one."""
        return number * self.num_ranks if self._adds_up else number

    def report(self, record: PassRecord) -> PassReport:
        """Return the report of this rank's pass."""
        text = f"runs {record}"
        if record.direction in _OF_CHANNELS:
            text += f" with {channels_of(self.size)} channels"
        return PassReport(self.size, int(record.fingerprint), self.group.rank(), text)

    def report_abort(self, error: BaseException) -> str:
        """Write why this rank aborts the pass, before it does; return the text."""
        text = text_of(error)
        self.store.write_abort(PassReport(0, 0, self.group.rank(), text))
        return text

    def size_to_abort(self, size: int | None, text: str, device: torch.device) -> int:
        """Find out in which collective a rank that cannot make its next pass meets the others.

        ``size`` is the size of the message that it would have sent, or None if it does not know;
        ``text`` is its error.

        Returns:
            The size of the message that the others send or are to send; 0 if it cannot meet them.
        """
        if size is None or size not in self.last.sizes:
            expected = self._expected()
            if expected:
                return expected
            report = PassReport(size or 0, 0, self.group.rank(), text)
            first = self.store.write_first(report, self._count_operations(device))
            if first is not None:
                return first.size
        return size or 0

    def _expected(self) -> int:
        """Return the size that is expected to come next; 0 if none is, or ranks expect several.

        Some ranks may expect nothing, as after they have replaced a layer. If the other k ranks
        expect s, the sums of next sizes and of their squares are k s and k s².
        """
        if self._totals is None:
            return 0
        if self._totals.is_cuda:
            stream = torch.cuda.current_stream(self._totals.device)
            if not has_come(stream, _DEVICE_SECONDS):
                return 0
        next_sizes, squares = self._totals[-2:].tolist()
        if next_sizes == 0 or squares % next_sizes != 0 or next_sizes**2 % squares != 0:
            return 0
        expected = int(squares / next_sizes)
        return expected if expected != _SEVERAL and self.next_size_sent in (0, expected) else 0

    def _compare(self, record: PassRecord, device: torch.device) -> PassReport | None:
        """Return the report of the first rank to come, if it sends a message of another size."""
        many = self.num_comparisons >= _MAX_COMPARISONS or self.num_ranks > _MAX_RANKS
        if many and self.size in self._sizes_compared:
            return None
        self._sizes_compared.add(self.size)
        first = self.store.write_first(self.report(record), self._count_operations(device))
        return None if first is None or first.size == self.size else first

    def _all_switch(self, record: PassRecord, device: torch.device) -> bool:
        num_operations = self._count_operations(device)
        if self.num_comparisons > _MAX_COMPARISONS:
            return False
        message = f"{record.fingerprint:.0f} {self.size}"
        return self.store.all_switch(message, num_operations, self.num_ranks)

    def _switch_size(self, record: PassRecord, expected: int, device: torch.device) -> None:
        """Agree with all ranks to send messages of another size than is expected."""
        message = torch.zeros(expected, dtype=torch.float64, device=device)
        fingerprint = float(8 * digest(self.size, int(record.fingerprint)))
        message[-3] = fingerprint
        totals = collectives.all_reduce_sum(message, self.group)
        if self.is_asynchronous(device):
            stream = torch.cuda.current_stream(device)
            if not has_come(stream, self.timeout):
                raise RuntimeError(f"the sums did not come in {self.timeout:.0f} s")
        ops.verify_sums(totals.cpu(), self.sum_of(fingerprint))

    def _count_operations(self, device: torch.device) -> int | None:
        """Return the number of operations that the backend has counted; None if it does not."""
        self.num_comparisons += 1
        try:
            return _compat.count_operations(self.group, device)
        except RuntimeError:
            return None

    # CUDA.

    def status(self, device: torch.device) -> DeviceStatus:
        """Return the status for a pass on this CUDA device."""
        status = self.statuses.get(device)
        if status is None:
            seconds = self.timeout if self.waits_for_cuda else None
            status = self.statuses[device] = DeviceStatus(device, seconds)
        status.note_pass()
        return status

    def read_statuses(self) -> float:
        """Return a failure that a device has noted and that has not been raised; 0 without one.

        It is the sum of the fingerprints of the pass, negative if a rank has aborted it.
        """
        for status in self.statuses.values():
            found = status.read()
            if found != 0:
                return found
        return 0.0

    def has_stalled(self) -> bool:
        """Whether a device stands still, see :meth:`DeviceStatus.has_stalled`."""
        return any(status.has_stalled() for status in self.statuses.values())

    def is_told(self) -> bool:
        """Whether another rank has written of a failure to the group's store."""
        return self.store.has_failure(self.num_alignments)

    def clear_statuses(self) -> None:
        """Clear the notes of all devices."""
        for status in self.statuses.values():
            status.clear()

    def must_settle(self, size: int, device: torch.device) -> bool:
        """Whether the host must know the last sums before it sends a message of this size."""
        return (
            size not in self.last.sizes
            and self._totals is not None
            and self.is_asynchronous(device)
            and not torch.cuda.is_current_stream_capturing()
        )

    def aborting_message(self, size: int, device: torch.device) -> Tensor:
        """Return a message that aborts a pass, for its count is NaN.

        On a device it is part of the largest one so far. :meth:`enter` makes it, because a device
        that is full has no memory when it is needed.
        """
        with _compat.without_dispatch_modes(), torch.inference_mode(False):
            kept = self._aborting
            if kept is None or kept.numel() < size or not _is_on(kept, device):
                kept = torch.empty(size, dtype=torch.float64, device=device)
                if not _compat.is_in_cuda_graph(kept):
                    self._aborting = kept
            return kept[:size].fill_(torch.nan)  # again: a collective writes its result here

    @property
    def timeout(self) -> float:
        """How many seconds a collective on CUDA may take."""
        return _compat.timeout_of(self.group, torch.device("cuda")).total_seconds()

    def is_asynchronous(self, device: torch.device) -> bool:
        """Whether the host goes on before the sums on this device are known, as over NCCL."""
        return device.type == "cuda" and not self.waits_for_cuda


_states: WeakKeyDictionary[ProcessGroup, GroupState] = WeakKeyDictionary()


def group_state(group: ProcessGroup) -> GroupState:
    """Return the state of a group, for as long as the group lives."""
    state = _states.get(group)
    if state is None:
        state = _states[group] = GroupState(group)
    return state


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device, which may lack a number."""
    own = tensor.device
    return own.type == device.type and device.index in (None, own.index)


def states_over_nccl() -> list[GroupState]:
    """Return the states of all groups whose collectives on CUDA no host waits for."""
    known = [*_states.items()]
    return [state for _, state in known if state.is_over_nccl and not state.is_destroyed()]


def check_not_destroyed(group: ProcessGroup) -> None:
    """Raise ValueError if torch.distributed has made the group and destroyed it since."""
    if group_state(group).is_destroyed():
        raise collectives.destroyed(group.rank(), group.group_name)


def channels_of(size: int) -> int:
    """Return the C of a message of this size."""
    return (size - 4) // 2


def size_of(channels: int) -> int:
    """Return the size of a message of C channels."""
    return 2 * channels + 4


def same_channels(first: PassReport, second: PassReport) -> bool:
    """Whether two ranks make passes of as many channels, as far as their messages' sizes tell."""
    of_channels = first.fingerprint % 8 <= len(_OF_CHANNELS)
    return first.fingerprint != second.fingerprint or first.size == second.size or not of_channels
