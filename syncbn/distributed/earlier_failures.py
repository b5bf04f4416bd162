"""Failures of earlier passes on CUDA, which a rank learns of late because its host does not wait.

A rank learns of them from its devices or, if its device stands still, from the group's store.
"""

import torch

from syncbn.distributed import abort, collectives, errors
from syncbn.distributed.device_status import has_come
from syncbn.distributed.layer_id import ANONYMOUS
from syncbn.distributed.protocol import GroupState, states_over_nccl


def check(state: GroupState) -> None:
    """Raise RuntimeError if an earlier pass of the group, or of another one over NCCL, has failed.

    This rank sends no message of this pass. Over NCCL, ranks whose hosts have gone further may wait
    for it; :func:`abort.align` takes part in their collectives.
    """
    if state.is_misaligned:
        cause, hindrance = abort.align(state, collectives.likely_device(state.group), timeout=None)
        if hindrance:
            raise _error(
                state,
                "an earlier pass failed, and since then the ranks may have made different numbers "
                f"of passes: {hindrance}{cause and f' ({cause})'}; call destroy_process_group(), "
                "then init_process_group()",
            )
    failed = _failed(state)
    if failed is not None:
        raise _of_earlier_pass(failed)


def wait_for(device: torch.device, state: GroupState) -> None:
    """Wait until a device has the sums of the group's passes.

    Raises:
        RuntimeError: As :func:`check`.
        TimeoutError: The device has not come to them in the time that a collective may take.
    """
    failed: GroupState | None = None

    def is_known() -> bool:
        nonlocal failed
        failed = _failed(state)
        return failed is not None

    seconds, stream = state.timeout, torch.cuda.current_stream(device)
    if not has_come(stream, seconds, is_known) and failed is None:
        raise TimeoutError(f"the sums of an earlier pass did not come in {seconds:.0f} s")
    if failed is not None:
        raise _of_earlier_pass(failed)
    check(state)


def _failed(state: GroupState) -> GroupState | None:
    """Return the group of a failure that is known and was not raised; None without one."""
    if state.read_statuses() != 0:
        return state
    if state.has_stalled():
        if state.is_told():
            return state
        # The device may wait in this group for ranks that have failed in another one.
        for other in states_over_nccl():
            if not other.is_misaligned and other.read_statuses() != 0:
                return other
    return None


def _of_earlier_pass(state: GroupState) -> Exception:
    """Return the error for an earlier pass of a group, after its ranks have aligned."""
    device, hindrance = collectives.likely_device(state.group), ""
    note = state.read_statuses()
    failed = state.describe(round(abs(note) / state.num_verified))
    if state.is_asynchronous(device):
        cause, hindrance = abort.align(state, device)
    else:  # all ranks have made as many passes
        state.clear_statuses()
        report = state.store.read_abort()
        cause = "" if report is None else f"rank {report.rank}: {report.text}"
    state.forget_records()  # they hold the sizes that have followed in that pass
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
    return _error(state, text)


def _error(state: GroupState, text: str) -> Exception:
    return errors.with_layer_and_rank(RuntimeError(text), ANONYMOUS, state.group)
