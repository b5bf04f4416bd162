"""Groups of neighboring ranks, made once for each size."""

import contextlib
import os

import torch.distributed as dist

from syncbn import _compat
from syncbn.distributed import collectives
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.state import GroupState, group_state


def group_of_size(group_size: int | str) -> ProcessGroup:
    """Return this rank's group of ``group_size`` neighboring ranks.

    All ranks make the first call with a size: they compare it and make all groups of that size.

    Args:
        group_size: A divisor of the number of ranks, or "node": LOCAL_WORLD_SIZE.

    Raises:
        TypeError: ``group_size`` is neither a whole number nor a string.
        ValueError: ``group_size`` is no divisor of the number of ranks, another string, or "node"
            without LOCAL_WORLD_SIZE; another rank gave another size or raised such an error.
        RuntimeError: torch.distributed is not initialized, or another rank did not call this.
    """
    world = dist.group.WORLD if collectives.AVAILABLE else None
    if world is None:
        raise RuntimeError(
            f"group_size={group_size!r} divides the ranks of torch.distributed, which is not "
            "initialized; call torch.distributed.init_process_group first"
        )
    state = group_state(world)
    try:
        size = _size(group_size, world.size())
    except (TypeError, ValueError) as error:
        _compare(f"rank {world.rank()}: {error}", world, state)
        raise
    group = state.neighbors.get(size)
    if group is None or not _compat.is_registered(group):  # never made, or destroyed
        _compare(size, world, state)
        group = world if size == world.size() else dist.new_subgroups(size)[0]
        state.neighbors[size] = group
    return group


def _size(group_size: object, world_size: int) -> int:
    if isinstance(group_size, str):
        if group_size != "node":
            raise ValueError(
                f"expected group_size to be a number or 'node', but got {group_size!r}"
            )
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not text.isdecimal():
            raise ValueError(
                "group_size='node' needs the environment variable LOCAL_WORLD_SIZE, the number of "
                f"this node's ranks, which torchrun sets; it is {text!r}; give the number instead"
            )
        size = int(text)
        what = f"the node's {size} ranks (LOCAL_WORLD_SIZE)"
    elif isinstance(group_size, int) and not isinstance(group_size, bool):
        size, what = group_size, f"group_size={group_size}"
    else:
        raise TypeError(
            f"expected group_size to be a number or 'node', but got {type(group_size).__name__}"
        )
    if size < 1:
        raise ValueError(f"expected group_size to be positive, but got {size}")
    if world_size % size:
        raise ValueError(
            f"{what} must divide the number of ranks: of {world_size} ranks {world_size % size} "
            "would be left"
        )
    return size


def _compare(own: int | str, world: ProcessGroup, state: GroupState) -> None:
    """Give the other ranks this rank's size, or its error; raise if one of them gives another."""
    state.num_sizes_compared += 1
    number, store = state.num_sizes_compared, collectives.store_of(world)
    if store is None:  # MPI's groups have none
        return
    store.set(f"syncbn/group_size/{number}/{world.rank()}", str(own))
    # All ranks have read the sizes of the comparison before the last: since then each has come to
    # the last one.
    with contextlib.suppress(RuntimeError):  # some stores cannot delete
        store.delete_key(f"syncbn/group_size/{number - 2}/{world.rank()}")
    if isinstance(own, str):
        return
    for rank in range(world.size()):
        try:
            other = store.get(f"syncbn/group_size/{number}/{rank}").decode()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {world.rank()} makes groups of {own} ranks, but rank {rank} does not; "
                "convert with the same group_size on all ranks"
            ) from error
        if other.isdecimal() and int(other) != own:
            raise ValueError(
                f"expected the same group_size on all ranks, but rank {world.rank()} gave {own} "
                f"and rank {rank} gave {other}"
            )
        if not other.isdecimal():
            raise ValueError(f"no groups of {own} ranks were made: {other}")
