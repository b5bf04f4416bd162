"""What each step of a pass touches: the record of the pass, and the state of its group.

:mod:`syncbn.distributed.negotiation` says what they are for.
"""

from collections import deque
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import _compat
from syncbn.distributed import collectives
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.device_status import DeviceStatuses, has_come
from syncbn.distributed.layer_id import ANONYMOUS, Identity, digest
from syncbn.distributed.passes import SEVERAL, Group, Record
from syncbn.distributed.store import GroupStore, PassReport

# Their positions are part of the fingerprints.
STEP = "step of recompute_statistics"  # between its batches: no pass of a layer
_DIRECTIONS = ("forward", "recomputation", "backward", "double backward", STEP)
_OF_CHANNELS = _DIRECTIONS[:3]  # whose messages are sums of channels

# Bounds of the records of a program that makes new layers all the time.
_MAX_RECORDS = 10_000
_MAX_POSITION = 255  # of calls of sync_batch_norm(); all later ones share a record
# Messages whose sizes are kept; a device queues no more than some thousand launches of its host.
_MAX_AHEAD = 4096
# For a device that has yet to come to the last sums, when its rank fails: it must not wait without
# a bound, because a rank that has failed earlier may be missing in them.
_DEVICE_SECONDS = 5.0


class PassRecord(Record):
    """One direction of one layer: in a group its fingerprint, and the sizes that have followed."""

    __slots__ = ("checked", "end", "layer", "num_dims", "state")

    def __init__(self, state: "GroupState | None", layer: Identity, direction: str) -> None:
        fingerprint = 0.0
        if state is not None:
            hashed = digest(layer.number, direction)
            fingerprint = float(8 * hashed + _DIRECTIONS.index(direction) + 1)
        super().__init__(direction, fingerprint)
        # The state of the group; None in one process.
        self.state = state
        # A copy of the layer's identity, whose end is also the record's.
        self.layer = layer.copy()
        self.end: ref[Identity] | None = None
        # The numbers and the number of dimensions that the last pass had and that were right.
        self.checked: object = None
        self.num_dims = 0

    def is_in(self, group: ProcessGroup | None) -> bool:
        """Whether passes of this group have this record; of no group or one rank, without state."""
        if self.state is None:
            return group is None or (collectives.is_process_group(group) and group.size() == 1)
        return group is not None and self.state.get_group() is group and group.size() > 1

    @property
    def tail(self) -> Tensor | None:
        """The end of a message: fingerprint, next size and its square, float64 [3] on the CPU.

        None in one process.
        """
        if self.state is None:
            return None
        if self.kept_tail is not None and _compat.num_dispatch_modes() == 0:
            return self.kept_tail
        numbers = [self.fingerprint, self.next_size, self.next_size**2]
        if _compat.is_faking():
            return torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if self.kept_tail is None:
            with _compat.without_dispatch_modes(), torch.inference_mode(False):
                self.kept_tail = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return self.kept_tail

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


class GroupState(Group):
    """The state of a process group on this rank: the passes made in it, and the expected ones."""

    def __init__(self, group: ProcessGroup) -> None:
        backend = collectives.cuda_backend(group)
        self._rank, self.name = group.rank(), collectives.name_of(group)
        # Whether torch.distributed has made the group, which it may destroy.
        self.is_registered = _compat.is_registered(group)
        # A rank over NCCL may be passes ahead of another.
        self.is_over_nccl = backend not in ("", "gloo")
        adds_up, sizes_sent = collectives.adds_up(group), deque[int](maxlen=_MAX_AHEAD)
        super().__init__(adds_up, backend == "gloo", group.size(), sizes_sent)
        self.store = GroupStore(group, self, keeps_keys=self.is_over_nccl)
        # A weak reference, for the reason that collectives.GroupReference gives.
        self.get_group = ref(group, self.store.close)
        # The records by key and number of their layer, and by direction; those of calls of
        # sync_batch_norm() by the position of the call.
        self._records: dict[tuple[int, int, str], PassRecord] = {}

        # How often the ranks may have gone on at different passes, the start included.
        self.num_failures = 0
        self.forget()
        # How often sizes were compared in the store, and the sizes that were.
        self.num_comparisons = 0
        self.sizes_compared: set[int] = set()
        # For groups.group_of_size: this rank's group of neighbors by size, weak because the group
        # may be this one; and how often all ranks have compared a size.
        self.neighbors: WeakValueDictionary[int, ProcessGroup] = WeakValueDictionary()
        self.num_sizes_compared = 0
        # CUDA: the notes of devices.
        self.statuses = DeviceStatuses(self.timeout if self.waits_for_cuda else None)
        # NCCL: how often ranks have aligned, see alignment.align, and whether this rank can make no
        # more passes.
        self.num_alignments = 0
        self.is_lost = False
        # NCCL: a message of NaN, see alignment.aborting_message.
        self.aborting: Tensor | None = None

    @property
    def group(self) -> ProcessGroup:
        """The group."""
        group = self.get_group()
        assert group is not None  # whoever has the state has the group
        return group

    def is_destroyed(self) -> bool:
        """Whether torch.distributed has made the group and destroyed it since."""
        group = self.get_group()
        return group is None or (self.is_registered and not _compat.is_registered(group))

    def destroyed(self) -> ValueError:
        """Return the error for the use of the group after it was destroyed."""
        return collectives.destroyed(self._rank, self.name)

    def record(self, layer: Identity, direction: str) -> PassRecord:
        """Return the record of a pass."""
        number = layer.number
        if not layer.key:  # a call of sync_batch_norm()
            is_same_half = (direction == "forward") == self.last.is_forward
            number = min(self.num_in_row, _MAX_POSITION) if is_same_half else 0
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

    def describe(self, fingerprint: int) -> str:
        """Return the pass of a fingerprint, which this rank has made, as text."""
        records = [*self._records.values()]  # of which some may end meanwhile
        made = (str(r) for r in records if round(r.fingerprint) == fingerprint)
        return next(made, "an earlier pass")

    def report(self, record: PassRecord) -> PassReport:
        """Return the report of this rank's pass."""
        text = f"runs {record}"
        if record.direction in _OF_CHANNELS:
            text += f" with {channels_of(self.size)} channels"
        return PassReport(self.size, int(record.fingerprint), self.group.rank(), text)

    def forget(self, *, records: bool = False) -> None:
        """Expect nothing: at the start and after a failure ranks may go on at different passes.

        With ``records``, forget the sizes that have followed each pass, too.
        """
        if records:
            for record in [*self._records.values()]:
                record.forget_sizes()
        self.num_failures += 1
        self.last = PassRecord(self, ANONYMOUS, "forward")
        self.num_in_row = 0
        self.next_size_sent = 0
        self.totals = None

    def sum_of(self, number: float) -> float:
        """Return the sum of the ranks' numbers, if all of them send this one."""
        return number * (self.group.size() if self.adds_up else 1)

    def expectation(self, record: PassRecord, totals: Tensor) -> tuple[float | None, Tensor | None]:
        """Return ``tail_sum`` and ``status`` for the operator that takes the sums."""
        if record.direction == "recomputation" and _compat.num_dispatch_modes() > 0:
            if type(totals) is not Tensor or totals.is_cuda or totals.is_meta:
                return None, None  # the host cannot read them without waiting
            # A recomputation may get the sums that a mode or a compiler has kept.
            first = self.record(record.layer, "forward")
            with _compat.without_dispatch_modes():
                record = first if totals[-3] == self.sum_of(first.fingerprint) else record
        expected, note = record.fingerprint * self.num_summed, None
        if totals.is_cuda:
            note = self.notes[totals.device.index] = self.statuses.of(totals.device).note
        return expected, note

    def expected_size(self) -> int:
        """Return the size that is expected to come next; 0 if none is, or ranks expect several.

        Some ranks may expect nothing, as after they have replaced a layer. If the other k ranks
        expect s, the sums of next sizes and of their squares are k s and k s².
        """
        if self.totals is None:
            return 0
        if self.totals.is_cuda:
            stream = torch.cuda.current_stream(self.totals.device)
            if not has_come(stream, _DEVICE_SECONDS):
                return 0
        next_sizes, squares = self.totals[-2:].tolist()
        if next_sizes == 0 or squares % next_sizes != 0 or next_sizes**2 % squares != 0:
            return 0
        expected = int(squares / next_sizes)
        return expected if expected != SEVERAL and self.next_size_sent in (0, expected) else 0

    def count_operations(self, device: torch.device) -> int | None:
        """Return the number of operations that the backend has counted; None if it does not."""
        self.num_comparisons += 1
        try:
            return _compat.count_operations(self.group, device)
        except RuntimeError:
            return None

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


def states_over_nccl() -> list[GroupState]:
    """Return the states of all groups whose collectives on CUDA no host waits for."""
    known = [*_states.items()]
    return [state for _, state in known if state.is_over_nccl and not state.is_destroyed()]


# Compilers trace on behind a break of their graph, and refuse code that looks into a group.
@_compat.uncompiled
def record_of(process_group: ProcessGroup | None, layer: Identity, direction: str) -> PassRecord:
    """Return the record of a layer's pass in its group, where None is all ranks.

    Raises:
        TypeError, ValueError: As :func:`syncbn.distributed.collectives.resolve_group`; the group
            was destroyed.
    """
    group = process_group
    if group is None and collectives.AVAILABLE:
        group = dist.group.WORLD
    record: PassRecord | None = layer.record
    if record is None or record.direction != direction or not record.is_in(group):
        group = collectives.resolve_group(group)
        if group is None:
            record = PassRecord(None, layer, direction)
        else:
            record = group_state(group).record(layer, direction)
        if layer.key:  # calls of sync_batch_norm() have records by their positions
            layer.record = record
    if process_group is not None and record.state is not None and record.state.is_destroyed():
        raise record.state.destroyed()
    return record


def channels_of(size: int) -> int:
    """Return the C of a message of this size."""
    return (size - 4) // 2


def size_of(channels: int) -> int:
    """Return the size of a message of C channels."""
    return 2 * channels + 4


def same_channels(first: PassReport, second: PassReport) -> bool:
    """Whether two ranks make passes of as many channels; True if the sizes do not tell."""
    of_channels = first.fingerprint % 8 <= len(_OF_CHANNELS)
    return first.fingerprint != second.fingerprint or first.size == second.size or not of_channels
