"""The records of passes in graphs, which hold their groups by name."""

from syncbn.distributed import collectives, errors
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.state import PassRecord, group_state


def named_record(group_name: str | None, layer: Identity, direction: str) -> PassRecord:
    """Return the record of a pass in a graph, which holds the name of its group.

    Raises:
        RuntimeError: torch.distributed has no group of this name; the error names the layer.
    """
    known: PassRecord | None = layer.record
    state = None if known is None else known.state
    if group_name is None:
        if known is not None and state is None and known.direction == direction:
            return known
        record = PassRecord(None, layer, direction)
    else:
        if state is None or state.name != group_name or state.is_destroyed():
            try:
                state = group_state(collectives.group_named(group_name))
            except RuntimeError as error:
                raise errors.with_layer_and_rank(error, layer, None) from error.__cause__
        record = state.record(layer, direction)
    if layer.key and record.is_forward:
        layer.record = record
    return record
