"""The texts of errors between ranks."""

from traceback import walk_tb

import torch

from syncbn import _compat, ops
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.state import PassRecord, channels_of, same_channels
from syncbn.distributed.store import PassReport

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


_CHECKPOINT = "torch.utils.checkpoint"


def is_of_recomputation(error: Exception) -> bool:
    """Whether reading saved tensors has failed by an error in a checkpoint's recomputation.

    Other layers and passes abort by themselves, or not at all.
    """
    frames = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    return _CHECKPOINT in frames and frames[-1] != _CHECKPOINT


def of_operator(error: Exception, record: PassRecord, *, others_know: bool = True) -> Exception:
    """Return an operator's error, which may be that the ranks' sums are inconsistent.

    ``others_know`` is whether the other ranks get the same error now, and report their passes.
    """
    state, error = record.state, ops.in_its_class(error)
    assert state is not None
    if isinstance(error, ops.AbortedError):
        error = aborted(record, state.store.read_abort())
    elif isinstance(error, ops.PassesDifferError):
        own = state.report(record)
        error = different(own, state.store.read_different(own) if others_know else None)
    else:
        return of_pass(error, record)
    state.forget()  # as all ranks do
    return of_pass(error, record)


# The beginning of torch's error for a tensor on a device that the group has no backend for.
_NO_BACKEND = "No backend type associated with device type"


def is_own(error: Exception) -> bool:
    """Whether an error at a collective is of this rank alone, and no collective has failed."""
    is_local = isinstance(error, torch.OutOfMemoryError) or str(error).startswith(_NO_BACKEND)
    return is_local or _compat.is_of_dispatch_mode(error)


def of_collective(cause: Exception, record: PassRecord) -> Exception:
    """Return the error of a collective that failed, with the likely causes."""
    assert record.state is not None
    record.state.forget()
    reason = cause
    # torch fails to log the error of a group that it has not made, and raises that in its place.
    if isinstance(cause, ValueError) and isinstance(cause.__context__, RuntimeError):
        reason = cause.__context__
    if "Batching rule not implemented" in str(reason):
        text = "gradients of several ranks cannot be batched; leave out is_grads_batched=True"
        error = of_pass(NotImplementedError(text), record)
    else:
        text = (
            f"the {record.direction} all-reduce of a SyncBatchNorm layer failed: another rank has "
            "failed, left, did not come in time or runs another layer; look at the first error of "
            "the other ranks, and run with TORCH_DISTRIBUTED_DEBUG=DETAIL to compare what they do"
        )
        if _compat.active_ddp_model() is not None:
            text += (
                "; under DistributedDataParallel, if one rank alone evaluates or makes another "
                "pass through the wrapper, its broadcast of buffers meets this all-reduce: call "
                "model.module there, or turn these broadcasts off"
            )
        error = RuntimeError(f"{of_pass(RuntimeError(text), record)}: {reason}")
    error.__cause__ = cause
    return error


def of_pass(error: Exception, record: PassRecord) -> Exception:
    """Return the error with the layer and the rank of a pass."""
    group = None if record.state is None else record.state.group
    return with_layer_and_rank(error, record.layer, group)


def aborted(record: PassRecord, report: PassReport | None) -> RuntimeError:
    """Return the error for a pass that another rank has aborted."""
    why = "that rank's own message tells the error"
    if report is not None:
        why = f"rank {report.rank}: {report.text}"
    return RuntimeError(
        f"another rank of the process group aborted this {record.name} because of an error; {why}"
    )


def different(own: PassReport, other: PassReport | None) -> Exception:
    """Return the error for ranks that make different passes."""
    if other is None:
        others = "another rank does not"
    else:
        others = f"rank {other.rank} {other.text}"
        if not same_channels(own, other):
            return ValueError(
                f"expected the same channels on all ranks, but this rank normalizes "
                f"{channels_of(own.size)} while another normalizes {channels_of(other.size)}: "
                f"this rank {own.text}, while {others}"
            )
    return RuntimeError(
        f"the ranks run different passes: this rank {own.text}, while {others}; all ranks must "
        "run the same layers in the same order, forward and backward"
    )
