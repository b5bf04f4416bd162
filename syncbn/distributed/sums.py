"""The sums of a pass over the ranks of its group, and whether all ranks have made this pass.

``message`` is what a rank sends, ``totals`` its sum over all ranks.
"""

import torch.distributed as dist
from torch import Tensor

from syncbn import _compat, ops
from syncbn._compat import is_profiling, num_dispatch_modes
from syncbn.distributed import alignment, collectives, failures, negotiation
from syncbn.distributed.collectives import SUM, TORCHS_ALL_REDUCE
from syncbn.distributed.state import PassRecord


def all_reduce(message: Tensor, record: PassRecord) -> Tensor:
    """Sum a message over the ranks; in one process, return it.

    If its size has not followed the last pass before, the ranks first agree on it. The sums may be
    inconsistent; the operators that take them verify them.

    Raises:
        NotImplementedError: In a batch of gradients (``is_grads_batched``).
        RuntimeError, ValueError: Another rank sends another size, or has aborted the pass; the
            collective failed.
    """
    state, size = record.state, message.numel()
    if state is None:
        return message
    last, next_size, group = state.last, record.next_size, state.get_group()
    assert group is not None
    is_new = size not in last.sizes
    if is_new and state.is_asynchronous(message.device):
        failures.wait_for_totals(state, record, message.device)
    state.num_passes += 1
    state.size = size
    state.sizes_sent.append(size)
    if is_new:
        negotiation.agree(state, record, message.device)
    state.num_in_row = state.num_in_row + 1 if record.is_forward is last.is_forward else 1
    state.last, state.next_size_sent, state.totals = record, next_size, None
    state.num_summed = group.size() if state.adds_up else 1
    try:
        if is_profiling() or num_dispatch_modes() > 0 or dist.all_reduce is not TORCHS_ALL_REDUCE:
            label = record.label if is_profiling() else ""
            totals = collectives.all_reduce_sum(message, group, label)
        else:
            totals, work = message, group.allreduce([message], SUM)
            if work is not None:  # a group written in Python may return None
                work.wait()
    except (RuntimeError, ValueError) as error:
        raise failures.in_collective(error, record, message)  # noqa: B904  # it has a cause
    # Kept for the sizes in their tail, which tell the next message's; memory of a CUDA graph must
    # not be kept.
    if type(totals) is Tensor and not (totals.is_cuda and _compat.is_in_cuda_graph(totals)):
        state.totals = totals
    return totals


def verify(totals: Tensor, record: PassRecord) -> Tensor:
    """Return the sums without their tail.

    On CUDA, where nothing waits for them, they are NaN if they are inconsistent.

    Raises:
        RuntimeError: The ranks make different passes, or another rank has aborted this one; not
            on CUDA.
        ValueError: One value per channel in the whole group; not on CUDA.
    """
    state, first, status = record.state, None, None
    if state is None:
        return totals
    if record.direction == "recomputation":
        # It may get the sums of the forward pass, which a dispatch mode or a compiler has kept.
        first = state.sum_of(state.record(record.layer, "forward").fingerprint)
    if type(totals) is Tensor and totals.is_cuda:
        _, status = state.expectation(record, totals)
    operators = ops.usual if num_dispatch_modes() == 0 else ops.around(None)
    try:
        return operators.verify_sums(totals, state.sum_of(record.fingerprint), first, status)
    except Exception as error:
        raise failures.in_operator(error, record, totals) from None


def verify_on_host(totals: Tensor, record: PassRecord) -> Tensor:
    """Return the sums on the CPU, after :func:`verify`; waits for the device."""
    state, device = record.state, totals.device
    if state is None or not state.is_asynchronous(device):
        return verify(totals.cpu(), record)
    failures.wait_for(state, record, device)
    totals = totals.cpu()
    try:
        return verify(totals, record)
    except RuntimeError:
        alignment.align(state, device)  # the other ranks hear of it in a later pass
        raise
