"""Reports of a failed pass, which ranks leave for each other in the group's store."""

import contextlib
from datetime import timedelta

from syncbn import collectives
from syncbn.agreement import History, Record, Report
from syncbn.collectives import ProcessGroup

__all__ = ["another_pass", "read_withdrawal", "write_withdrawal"]

_MAX_CHARACTERS = 1000
# All ranks come out of the same collective, but some may be busy.
_PATIENCE = timedelta(seconds=5)


def write_withdrawal(group: ProcessGroup, history: History, error: BaseException) -> str:
    """Tell why this rank withdraws, before it does; return the words."""
    words = f"{type(error).__name__}: {str(error)[:_MAX_CHARACTERS]}"
    store = collectives.store_of(group)
    if store is not None:
        with contextlib.suppress(RuntimeError):
            report, key = Report(0, 0, group.rank(), words), _key(history, "withdrawn")
            history.remember_key(key, store)
            store.compare_set(key, "", report.encode())
    return words


def read_withdrawal(group: ProcessGroup, history: History) -> Report | None:
    """Return why a rank has withdrawn; None if that is not known."""
    store, key = collectives.store_of(group), _key(history, "withdrawn")
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
        if (first.size, first.tag) != (mine.size, mine.tag):
            store.compare_set(second, "", mine.encode())
            return first
        store.wait([second], _PATIENCE)
        return Report.parse(store.get(second))
    return None


def _key(history: History, word: str) -> str:
    return f"{history.prefix}/pass {history.num_passes}/{word}"
