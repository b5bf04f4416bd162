"""The words of errors between ranks."""

import torch

from syncbn import ops
from syncbn.distributed import protocol
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.protocol import Record, Report, channels_of, same_channels

__all__ = ["of_collective", "of_pass", "of_report", "with_layer_and_rank"]


# Errors that are raised again, with the layer and the rank in their text.
_REWRITTEN = (TypeError, ValueError, NotImplementedError, RuntimeError, torch.OutOfMemoryError)


def with_layer_and_rank(error: Exception, layer: Identity, group: ProcessGroup | None) -> Exception:
    """Return the error with the layer and the rank, as far as known, at the end of its text.

    An error of a class that may take other arguments than a text is returned as it is.
    """
    rank = "" if group is None else f"rank {group.rank()} of {group.size()}"
    name = f"layer {layer.name!r}" if layer.name else ""
    known = ", ".join(part for part in (name, rank) if part)
    if not known or type(error) not in _REWRITTEN:
        return error
    return type(error)(f"{error} [{known}]")


def of_pass(
    error: Exception, layer: Identity, group: ProcessGroup | None, record: Record | None
) -> Exception:
    """Return an error of an operator, which may have found that the ranks' sums are not sound."""
    not_sound = isinstance(error, (ops.AbortedError, ops.PassesDifferError))
    if group is None or record is None or not not_sound:
        return with_layer_and_rank(error, layer, group)
    history = record.history
    if isinstance(error, ops.AbortedError):
        error = _aborted(record, protocol.read_abort(group, history))
    else:
        other = protocol.another_pass(group, history, record)
        error = _different(history.report(record, group), other)
    history.forget()  # as all ranks do
    return with_layer_and_rank(error, layer, group)


def of_report(other: Report, group: ProcessGroup, record: Record) -> Exception:
    """Return the error of a rank that is not to meet another rank, which has reported."""
    history = record.history
    if other.fingerprint == 0:
        error: Exception = _aborted(record, other)
    else:
        error = _different(history.report(record, group), other)
    history.forget()
    return with_layer_and_rank(error, record.layer, group)


def of_collective(error: Exception, group: ProcessGroup, record: Record) -> Exception:
    """Return the error of a collective that failed, with what may have happened and where."""
    record.history.forget()
    # torch fails to log the error of a group that it has not made, and raises that in its place.
    if isinstance(error, ValueError) and isinstance(error.__context__, RuntimeError):
        error = error.__context__
    if "Batching rule not implemented" in str(error):
        words = "gradients of several ranks cannot be batched; leave out is_grads_batched=True"
        return with_layer_and_rank(NotImplementedError(words), record.layer, group)
    words = (
        f"the {record.direction} all-reduce of a SyncBatchNorm layer failed: another rank has "
        "failed, left, did not come in time or runs another layer; look at the first error of the "
        "other ranks, and run with TORCH_DISTRIBUTED_DEBUG=DETAIL to compare what they do"
    )
    located = with_layer_and_rank(RuntimeError(words), record.layer, group)
    return RuntimeError(f"{located}: {error}")


def _aborted(record: Record, report: Report | None) -> RuntimeError:
    why = "that rank's own message says which"
    if report is not None:
        why = f"rank {report.rank}: {report.words}"
    return RuntimeError(
        f"another rank of the process group aborted this {record.name} because of an error; {why}"
    )


def _different(own: Report, other: Report | None) -> Exception:
    if other is None:
        others = "another rank does not"
    else:
        others = f"rank {other.rank} {other.words}"
        if not same_channels(own, other):
            return ValueError(
                f"expected the same channels on all ranks, but this rank normalizes "
                f"{channels_of(own.size)} while another normalizes {channels_of(other.size)}: "
                f"this rank {own.words}, while {others}"
            )
    return RuntimeError(
        f"the ranks run different passes: this rank {own.words}, while {others}; all ranks must "
        "run the same layers in the same order, forward and backward"
    )
