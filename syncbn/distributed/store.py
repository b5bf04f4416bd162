"""The keys that the ranks of a group write to the group's store: reports and decisions."""

import contextlib
from collections import deque
from datetime import timedelta
from typing import NamedTuple
from weakref import ref

from syncbn import _compat
from syncbn.distributed import collectives
from syncbn.distributed.collectives import ProcessGroup, Store
from syncbn.distributed.passes import Group

# The ranks come out of the same collective, but some may be busy.
_REPORT_TIMEOUT = timedelta(seconds=5)
# For ranks that switch to another message size together: in training they arrive much sooner.
_SWITCH_TIMEOUT = timedelta(seconds=1)
_MAX_CHARACTERS = 1000  # of an error


class PassReport(NamedTuple):
    """The pass of one rank, for the other ranks: size and fingerprint of its message, and a text.

    The fingerprint of a rank that has aborted is 0, and the text is its error; the size is 0 if the
    rank does not know which size the others send.
    """

    size: int
    fingerprint: int
    rank: int
    text: str

    @classmethod
    def parse(cls, encoded: bytes) -> "PassReport":
        """Return the report of a text that :meth:`encode` has made."""
        size, fingerprint, rank, text = encoded.decode().split(" ", 3)
        return cls(int(size), int(fingerprint), int(rank), text)

    def encode(self) -> str:
        """Return the report as text."""
        return _storable(" ".join(map(str, self)))


def _storable(text: str) -> str:
    """Return the text without lone surrogates, as of a path that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """Return the class and the words of an error, for the store."""
    try:
        words = str(error)
    except Exception as own:  # of a class of the user's
        words = f"its text cannot be read: {type(own).__name__}"
    return f"{type(error).__name__}: {words[:_MAX_CHARACTERS]}"


class GroupStore:
    """The store of a group. MPI's groups have none; then a rank finds no keys of others."""

    def __init__(self, group: ProcessGroup, passes: Group, *, keeps_keys: bool) -> None:
        self._store = collectives.store_of(group)
        self._passes = ref(passes)  # which hold this object
        # Groups that have had the same store, one after the other, use different keys.
        self._prefix = f"syncbn/{self._count_groups(group)}"
        # Whether this rank may be passes ahead of another one that still has to read its keys.
        self._keeps_keys = keeps_keys
        # The keys that this rank has written, each with the number of its pass.
        self._keys: deque[tuple[int, str]] = deque()

    @property
    def num_passes(self) -> int:
        """The number of passes that this rank has made in the group, aborted ones included."""
        passes = self._passes()
        assert passes is not None
        return passes.num_passes

    def close(self, _: object) -> None:
        """Let the store go, because the group has ended: its connections are closed."""
        self._store = None

    # Compilers, which trace on behind a break of their graph, refuse code that touches a store.
    @_compat.uncompiled
    def _count_groups(self, group: ProcessGroup) -> int:
        """Return how many groups of this rank have had the group's store, this one included."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                return int(self._store.add(f"syncbn/groups of rank {group.rank()}", 1))
        return 0

    def write_first(self, report: PassReport, num_operations: int | None) -> PassReport | None:
        """Write a report, if this rank is the first to do so at this pass; return the first one.

        ``num_operations`` is the number of operations that the group's backend has counted: ranks
        meet here if all their backends have counted as many. Sends between some ranks make the
        numbers differ; such ranks find only their own reports.

        Returns:
            None without a store or a number.
        """
        if self._store is None or num_operations is None:
            return None
        key = self._key_of_operation(num_operations)
        return PassReport.parse(self._store.compare_set(key, "", report.encode()))

    def all_switch(self, message: str, num_operations: int | None, num_ranks: int) -> bool:
        """Whether all ranks are to send this message, of another size than was expected.

        Waits a moment for the other ranks, which may as well wait in the collective of the expected
        size. ``num_operations`` as in :meth:`write_first`.
        """
        if self._store is None or num_operations is None:
            return False
        counter = self._key_of_operation(num_operations, f"/{message}")
        decision = self._key_of_operation(num_operations, "/all switch")
        if self._store.add(counter, 1) == num_ranks:
            return bool(self._store.compare_set(decision, "", "yes") == b"yes")
        with contextlib.suppress(RuntimeError):  # the time has passed
            self._store.wait([decision], _SWITCH_TIMEOUT)
        return bool(self._store.compare_set(decision, "", "no") == b"yes")

    def write_abort(self, report: PassReport) -> None:
        """Write why this rank aborts the pass, before it does."""
        with contextlib.suppress(Exception):  # a store of any class; without it, no text
            if self._store is not None:
                self._store.compare_set(self._key_of_pass("aborted"), "", report.encode())

    def read_abort(self) -> PassReport | None:
        """Return the report of a rank that has aborted the pass; None if there is none."""
        key = self._key_of_pass("aborted", is_written=False)
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check([key]):
                return PassReport.parse(self._store.get(key))
        return None

    def read_different(self, own: PassReport) -> PassReport | None:
        """Return the report of a rank that makes another pass than this rank; None if not known.

        All ranks call this. The first rank writes its report, the first rank with another pass
        writes a second one, and each reads the one that differs from its own.
        """
        with contextlib.suppress(RuntimeError):
            if self._store is None:
                return None
            second = self._key_of_pass("second")
            first = self._store.compare_set(self._key_of_pass("first"), "", own.encode())
            report = PassReport.parse(first)
            if (report.size, report.fingerprint) != (own.size, own.fingerprint):
                self._store.compare_set(second, "", own.encode())
                return report
            self._store.wait([second], _REPORT_TIMEOUT)
            return PassReport.parse(self._store.get(second))
        return None

    def write_stop(self, number: int, rank: int, stop: str, *, replaces: bool) -> None:
        """Write this rank's stop at failure ``number``, and mark the failure.

        Raises:
            RuntimeError: The store fails, or there is none.
        """
        store, key = self._writable(), self._key_of_stop(number, rank)
        if replaces:
            store.set(key, _storable(stop))
        else:
            store.compare_set(key, "", _storable(stop))
        store.set(self._key_of_stop(number), "")

    def has_failure(self, number: int) -> bool:
        """Whether a rank has written its stop at failure ``number``."""
        with contextlib.suppress(RuntimeError):
            return self._store is not None and self._store.check([self._key_of_stop(number)])
        return False

    def read_stops(self, number: int, num_ranks: int, timeout: timedelta | None) -> dict[int, str]:
        """Return the stops at failure ``number`` that come in time, by rank.

        The timeout is the store's where it is None.

        Raises:
            RuntimeError: The store fails, or there is none.
        """
        store = self._writable()
        keys = [self._key_of_stop(number, rank) for rank in range(num_ranks)]
        with contextlib.suppress(RuntimeError):  # the time has passed
            store.wait(keys, *([] if timeout is None else [timeout]))
        return {
            rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])
        }

    def _writable(self) -> Store:
        if self._store is None:
            raise RuntimeError("the group has none")
        return self._store

    def _key_of_stop(self, number: int, rank: int | str = "any") -> str:
        return f"{self._prefix}/failure {number}/{rank}"

    def _key_of_pass(self, word: str, *, is_written: bool = True) -> str:
        key = f"{self._prefix}/pass {self.num_passes}/{word}"
        if is_written:
            self._remember(key)
        return key

    def _key_of_operation(self, num_operations: int, word: str = "") -> str:
        key = f"{self._prefix}/{num_operations}/{self.num_passes}{word}"
        self._remember(key)
        return key

    def _remember(self, key: str) -> None:
        """Remember a key that this pass writes, and delete the keys that all ranks have read.

        This rank has left the collective of the last pass, so all ranks have left the pass before.
        """
        if self._keeps_keys or self._store is None:
            return
        while self._keys and self._keys[0][0] < self.num_passes - 1:
            with contextlib.suppress(RuntimeError):  # of stores that cannot
                self._store.delete_key(self._keys.popleft()[1])
        self._keys.append((self.num_passes, key))
