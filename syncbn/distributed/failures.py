"""Failures of a rank, which end the passes of the other ranks soon, with words.

A rank that fails before the collective of its pass takes part in it all the same, with a count of
NaN, and so aborts it on all ranks. Over NCCL hosts do not wait for the sums: a rank learns of the
failure in a later pass, from its devices or, if its device stands still, from the group's store.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import _compat, ops
from syncbn.distributed import alignment, collectives, errors
from syncbn.distributed.collectives import ProcessGroup, Work
from syncbn.distributed.device_status import has_come, has_failed
from syncbn.distributed.layer_id import ANONYMOUS
from syncbn.distributed.state import GroupState, PassRecord, group_state, size_of, states_over_nccl
from syncbn.distributed.store import PassReport, text_of
from syncbn.ops import checks
from syncbn.ops.arguments import Arguments

# This rank fails before the collective of its pass.


def abort(
    error: Exception,
    record: PassRecord,
    input: object = None,
    arguments: Arguments | None = None,
    channels: int | None = None,
) -> Exception:
    """Abort a pass on all ranks because of an error; return it with the layer and the rank.

    The message's size and device follow from the input, the arguments or C. None if not known.
    """
    with _compat.without_overrides():  # which may have raised it
        error = ops.in_its_class(error)
        if arguments is not None:
            error = checks.explain(error, input, arguments)
        state = record.state
        if state is not None:
            size, device = _size_and_device(input, arguments, channels)
            _finish(_start(error, state, size, device))
    return errors.of_pass(error, record)


def abort_unread(error: Exception, record: PassRecord, grad_output: Tensor) -> Exception:
    """Do as :func:`abort`, because of an error in reading saved tensors."""
    if record.state is None or errors.is_of_recomputation(error):
        return error
    is_ended = record.state.last.direction == "recomputation"  # by the error, at any layer
    return abort(error, record, None if is_ended else grad_output)


def abort_next_pass(error: Exception, groups: Iterable[ProcessGroup]) -> None:
    """Abort whichever pass the other ranks of these groups make next.

    Starts in all groups before it waits for any: the others may wait in any of them.
    """
    for started in [_start(error, group_state(group), None, None) for group in groups]:
        _finish(started)


def _size_and_device(
    input: object, arguments: Arguments | None, channels: int | None
) -> tuple[int | None, torch.device | None]:
    vectors = [] if arguments is None else [*arguments.vectors]
    tensors = [tensor for tensor in (*vectors, input) if isinstance(tensor, Tensor)]
    if arguments is not None:
        channels = arguments.num_features
    if channels is None:
        sizes = [v.size(0) for v in vectors if isinstance(v, Tensor) and v.dim() == 1]
        if isinstance(input, Tensor) and input.dim() > 1 and not input.is_nested:
            sizes.append(input.size(1))
        channels = sizes[0] if sizes else None
    size = size_of(channels) if isinstance(channels, int) else None
    return size, tensors[0].device if tensors else None


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
    text, work, is_known = "", None, False
    # No error in here may hide the rank's own, or keep it from the others.
    with _no_trace(), _compat.without_dispatch_modes():
        with contextlib.suppress(RuntimeError):  # a failed device cannot tell
            # After an earlier failure no rank waits in this pass.
            is_known = state.is_misaligned or state.statuses.read() != 0
        if not is_known:
            state.num_passes += 1
            text = _report_abort(error, state)
            with contextlib.suppress(RuntimeError, ValueError):  # of a store that fails
                size = _size_to_abort(state, size, text, device)
            state.sizes_sent.append(size or 0)
            work = _send_abort(state, size, device, text) if size else None
    state.forget()
    aligns = state.is_asynchronous(device) and (is_known or work is not None)
    return _Started(state, device, text, work, aligns)


@_compat.uncompiled
def _finish(started: _Started) -> None:
    """Wait until the others know that this rank aborts the pass."""
    deadline = time.monotonic() + alignment.SEND_SECONDS
    with contextlib.suppress(RuntimeError, ValueError):
        if started.aligns:
            alignment.align(started.state, started.device, started.text)
            alignment.wait_until_sent(started.work, deadline)
        elif started.work is not None:
            started.work.wait()


def _send_abort(state: GroupState, size: int, device: torch.device, text: str) -> Work | None:
    """Start the collective of a pass that this rank aborts."""
    try:
        return collectives.start_sum(alignment.aborting_message(state, size, device), state.group)
    except Exception:  # of a group of any class, or of a device that has failed
        if state.is_asynchronous(device):
            alignment.leave(text)
        return None


def _report_abort(error: BaseException, state: GroupState) -> str:
    """Write why this rank aborts the pass, before it does; return the text."""
    text = text_of(error)
    state.store.write_abort(PassReport(0, 0, state.group.rank(), text))
    return text


def _size_to_abort(state: GroupState, size: int | None, text: str, device: torch.device) -> int:
    """Find out in which collective a rank that cannot make its next pass meets the others.

    ``size`` is the size of the message that it would have sent, or None if it does not know;
    ``text`` is its error.

    Returns:
        The size of the message that the others send or are to send; 0 if it cannot meet them.
    """
    if size is None or size not in state.last.sizes:
        expected = state.expected_size()
        if expected:
            return expected
        report = PassReport(size or 0, 0, state.group.rank(), text)
        first = state.store.write_first(report, state.count_operations(device))
        if first is not None:
            return first.size
    return size or 0


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


def check_before(record: PassRecord) -> None:
    """Raise an error that does not abort the pass, because all ranks raise it or have gone on.

    Raises:
        RuntimeError: An earlier pass on CUDA has failed.
        NotImplementedError: A forward pass under DistributedDataParallel.join(). There a rank
            without inputs takes part in the collectives of gradients only: the other ranks would
            wait for it in a layer, or add its gradients to their messages.
    """
    state = record.state
    if state is None:
        return
    if state.is_misaligned or state.statuses.by_device:
        with _told_of_lost_devices(state):
            _check_earlier_passes(state)
    join = _compat.join_config() if record.direction == "forward" else None
    if join is not None and join.enable and not join.throw_on_early_termination:
        text = (
            "SyncBatchNorm cannot train under DistributedDataParallel.join(), where a rank that "
            "has run out of inputs does not take part in the layer's all-reduce; give such a rank "
            "empty batches instead, or call join(throw_on_early_termination=True) to end all ranks "
            "together"
        )
        raise errors.of_pass(NotImplementedError(text), record)


# An operator or the collective fails.


def in_operator(
    error: Exception, record: PassRecord, input: Tensor, arguments: Arguments | None = None
) -> Exception:
    """Return the error of an operator that takes the sums, with the passes of other ranks."""
    if record.state is None:
        return abort(error, record, input, arguments)
    if has_failed(input.device):
        alignment.leave(text_of(error))
    return errors.of_operator(error, record)


def in_collective(error: Exception, record: PassRecord, message: Tensor) -> Exception:
    """Return the error of the collective of a pass, which was not made or has failed."""
    state, device = record.state, message.device
    assert state is not None
    if not errors.is_own(error):
        if collectives.is_of_backend(error) and state.is_asynchronous(device):
            alignment.leave(text_of(error))  # NCCL takes no further collective
        return errors.of_collective(error, record)
    if not _compat.has_started(error):
        _withdraw(error, state, message.numel(), device)
    state.forget()
    new = errors.of_pass(error, record)
    new.__cause__ = error.__cause__
    return new


def in_agreement(error: Exception, record: PassRecord, device: torch.device) -> Exception:
    """Return an error of :mod:`syncbn.distributed.negotiation`."""
    state = record.state
    assert state is not None
    if not isinstance(ops.in_its_class(error), (ops.PassesDifferError, ops.AbortedError)):
        return errors.of_collective(error, record)
    is_late = state.is_asynchronous(device)  # the others hear of it in a later pass
    error = errors.of_operator(error, record, others_know=not is_late)
    error.__cause__ = None  # the operator's error says less
    if is_late:
        alignment.align(state, device, _report_abort(error, state))
    return error


def of_other_size(other: PassReport, record: PassRecord, device: torch.device) -> Exception:
    """Return the error for another rank's message of another size.

    This rank takes part in the other rank's collective, and so aborts it.
    """
    state = record.state
    assert state is not None
    if other.fingerprint == 0:
        error: Exception = errors.aborted(record, other)
    else:
        error = errors.different(state.report(record), other)
    state.forget()
    error = errors.of_pass(error, record)
    state.sizes_sent[-1] = other.size
    if other.size:
        _withdraw(error, state, other.size, device)
    return error


def _withdraw(error: Exception, state: GroupState, size: int, device: torch.device) -> None:
    """Abort the pass in the collective that the other ranks make of it."""
    text = _report_abort(error, state)
    device = collectives.likely_device(state.group, device)
    # Modes may have raised the error.
    with _compat.without_dispatch_modes(), contextlib.suppress(RuntimeError, ValueError):
        work = _send_abort(state, size, device, text)
        if state.is_asynchronous(device):
            alignment.wait_until_sent(work, time.monotonic() + alignment.SEND_SECONDS)
        elif work is not None:
            work.wait()
    if state.is_asynchronous(device):
        alignment.align(state, device, text)


# An earlier pass on CUDA has failed.


def _check_earlier_passes(state: GroupState) -> None:
    """Raise RuntimeError if an earlier pass of the group, or of another one over NCCL, has failed.

    This rank sends no message of this pass. Over NCCL, ranks whose hosts have gone further may wait
    for it; :func:`syncbn.distributed.alignment.align` takes part in their collectives.
    """
    if state.is_misaligned:
        device = collectives.likely_device(state.group)
        cause, hindrance = alignment.align(state, device, timeout=None)
        if hindrance:
            text = (
                "an earlier pass failed, and since then the ranks may have made different numbers "
                f"of passes: {hindrance}{cause and f' ({cause})'}; call destroy_process_group(), "
                "then init_process_group()"
            )
            raise errors.with_layer_and_rank(RuntimeError(text), ANONYMOUS, state.group)
    failed = _failed(state)
    if failed is not None:
        raise _of_earlier_pass(failed)


def wait_for_totals(state: GroupState, record: PassRecord, device: torch.device) -> None:
    """Do as :func:`wait_for` where the host needs the last sums, to know the expected size."""
    if state.totals is not None and not torch.cuda.is_current_stream_capturing():
        wait_for(state, record, device)


def wait_for(state: GroupState, record: PassRecord, device: torch.device) -> None:
    """Wait until a device has the sums of the group's passes so far.

    Raises:
        RuntimeError: As :func:`_check_earlier_passes`; the device has not come to them in the time
            that a collective may take.
    """
    failed: GroupState | None = None

    def is_known() -> bool:
        nonlocal failed
        failed = _failed(state)
        return failed is not None

    seconds, stream = state.timeout, torch.cuda.current_stream(device)
    with _told_of_lost_devices(state):
        is_late = not has_come(stream, seconds, is_known)
    if is_late and failed is None:
        late = TimeoutError(f"the sums of an earlier pass did not come in {seconds:.0f} s")
        raise errors.of_collective(late, record) from None
    if failed is not None:
        raise _of_earlier_pass(failed)
    _check_earlier_passes(state)


@contextlib.contextmanager
def _told_of_lost_devices(state: GroupState) -> Iterator[None]:
    """Tell the other ranks of an error that a question to a device of this rank raises."""
    try:
        yield
    except RuntimeError as error:
        if any(has_failed(device) for device in state.statuses.by_device):
            alignment.leave(text_of(error))
        raise


def _failed(state: GroupState) -> GroupState | None:
    """Return the group of a failure that is known and was not raised; None without one."""
    if state.statuses.read() != 0:
        return state
    if state.statuses.have_stalled():
        if state.store.has_failure(state.num_alignments):
            return state
        # The device may wait in this group for ranks that have failed in another one.
        for other in states_over_nccl():
            if not other.is_misaligned and other.statuses.read() != 0:
                return other
    return None


def _of_earlier_pass(state: GroupState) -> Exception:
    """Return the error for an earlier pass of a group, after its ranks have aligned."""
    device, hindrance = collectives.likely_device(state.group), ""
    note = state.statuses.read()
    failed = state.describe(round(abs(note) / state.num_summed))
    if state.is_asynchronous(device):
        cause, hindrance = alignment.align(state, device)
    else:  # all ranks have made as many passes
        state.statuses.clear()
        report = state.store.read_abort()
        cause = "" if report is None else f"rank {report.rank}: {report.text}"
    state.forget(records=True)  # they hold the sizes that have followed in that pass
    if note == 0:
        text = "this rank's device waits in an earlier pass: another rank has failed"
    elif note > 0:
        text = f"{failed} gave NaN: another rank made another pass in its place"
    else:
        text = (
            f"{failed} gave NaN: another rank of the process group aborted it because of an error"
        )
        text += "" if cause else ", or NCCL lost that rank"
    text += (
        f"{cause and f'; {cause}'}; raised in a later pass because the host does not wait for "
        "CUDA: it may be hundreds of launches ahead of the device, and what it has launched since "
        "then gave NaN or sums that belong to no pass"
    )
    if hindrance:
        text += f"; the ranks are not aligned yet: {hindrance}"
    return errors.with_layer_and_rank(RuntimeError(text), ANONYMOUS, state.group)
