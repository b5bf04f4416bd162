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
is one collective each way, nothing is sent to the store, and nothing in this file is called. One
case is not covered: if several sizes have followed a pass, ranks that diverge there meet with
different sizes.
"""

import torch

from syncbn import _compat, ops
from syncbn.distributed import alignment, collectives, failures
from syncbn.distributed.device_status import has_come
from syncbn.distributed.layer_id import digest
from syncbn.distributed.state import GroupState, PassRecord
from syncbn.distributed.store import PassReport

# Bounds of the store keys of a program that makes new layers all the time, and of the requests in a
# first step: a store answers some 50,000 a second. Beyond them, each size is compared once.
_MAX_COMPARISONS = 1000
_MAX_RANKS = 1024


def agree(state: GroupState, record: PassRecord, device: torch.device) -> None:
    """Compare the size of this rank's message with the other ranks', before the collective.

    Raises:
        RuntimeError, ValueError: Another rank makes another pass, or has aborted this one; the
            ranks cannot communicate.
    """
    other: PassReport | None = None
    # A dispatch mode, as of selective checkpointing, must see the same calls in each pass.
    with _compat.without_dispatch_modes():
        try:
            if device.type != "cpu" and not _compat.is_faking():
                alignment.aborting_message(state, state.size, device)  # while there is memory
            expected = state.expected_size()
            if expected == 0:
                other = _compare(state, record, device)
            elif expected != state.size and not _all_switch(state, record, device):
                _switch_size(state, record, expected, device)
        except (RuntimeError, ValueError) as error:
            # Not bound to a name: a frame that holds its own error is a reference cycle.
            raise failures.in_agreement(error, record, device)  # noqa: B904  # it has its cause
    if other is not None:
        raise failures.of_other_size(other, record, device)
    state.last.add_size(state.size)


def _compare(state: GroupState, record: PassRecord, device: torch.device) -> PassReport | None:
    """Return the report of the first rank to come, if it sends a message of another size."""
    many = state.num_comparisons >= _MAX_COMPARISONS or state.group.size() > _MAX_RANKS
    if many and state.size in state.sizes_compared:
        return None
    state.sizes_compared.add(state.size)
    first = state.store.write_first(state.report(record), state.count_operations(device))
    return None if first is None or first.size == state.size else first


def _all_switch(state: GroupState, record: PassRecord, device: torch.device) -> bool:
    num_operations = state.count_operations(device)
    if state.num_comparisons > _MAX_COMPARISONS:
        return False
    message = f"{record.fingerprint:.0f} {state.size}"
    return state.store.all_switch(message, num_operations, state.group.size())


def _switch_size(
    state: GroupState, record: PassRecord, expected: int, device: torch.device
) -> None:
    """Agree with all ranks to send messages of another size than is expected."""
    message = torch.zeros(expected, dtype=torch.float64, device=device)
    fingerprint = float(8 * digest(state.size, int(record.fingerprint)))
    message[-3] = fingerprint
    totals = collectives.all_reduce_sum(message, state.group)
    if state.is_asynchronous(device):
        stream = torch.cuda.current_stream(device)
        if not has_come(stream, state.timeout):
            raise RuntimeError(f"the sums did not come in {state.timeout:.0f} s")
    ops.usual.verify_sums(totals.cpu(), state.sum_of(fingerprint))
