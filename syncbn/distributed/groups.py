"""Groups of neighboring ranks: made once for each size."""

import contextlib
import os
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from syncbn import _compat
from syncbn.distributed import collectives
from syncbn.distributed.collectives import ProcessGroup

__all__ = ["group_of_size"]


class _Groups:
    """What one world has: its groups by size, and how often its ranks have agreed on a size."""

    def __init__(self) -> None:
        # Weak: the world may be one of them. torch.distributed holds groups until it destroys them.
        self.by_size: WeakValueDictionary[int, ProcessGroup] = WeakValueDictionary()
        self.num_agreements = 0


_of_world: WeakKeyDictionary[ProcessGroup, _Groups] = WeakKeyDictionary()


def group_of_size(group_size: int | str) -> ProcessGroup:
    """Return this rank's group of ``group_size`` neighboring ranks.

    The first call with a size is made by all ranks, which agree on it and make all groups of it.

    Args:
        group_size: A divisor of the number of ranks, or "node": LOCAL_WORLD_SIZE.

    Raises:
        TypeError: Neither a whole number nor a string.
        ValueError: No divisor of the number of ranks, another string, "node" without
            LOCAL_WORLD_SIZE, or another rank came with another size or with such an error.
        RuntimeError: torch.distributed is not initialized, or another rank did not come.
    """
    world = collectives.world()
    if world is None:
        raise RuntimeError(
            f"group_size={group_size!r} divides the ranks of torch.distributed, which is not "
            "initialized; call torch.distributed.init_process_group first"
        )
    groups = _of_world.setdefault(world, _Groups())
    try:
        size = _size(group_size, world.size())
    except (TypeError, ValueError) as error:
        _agree(f"rank {world.rank()}: {error}", world, groups)
        raise
    made = groups.by_size.get(size)
    if made is None or not _compat.is_registered(made):  # or has been destroyed
        _agree(size, world, groups)
        made = world if size == world.size() else dist.new_subgroups(size)[0]
        groups.by_size[size] = made
    return made


def _size(group_size: object, world_size: int) -> int:
    if isinstance(group_size, str):
        if group_size != "node":
            raise ValueError(
                f"expected group_size to be a number or 'node', but got {group_size!r}"
            )
        size = _ranks_of_this_node()
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


def _ranks_of_this_node() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not text.isdecimal():
        raise ValueError(
            "group_size='node' needs the environment variable LOCAL_WORLD_SIZE, the number of this "
            f"node's ranks, which torchrun sets; it is {text!r}; give the number instead"
        )
    return int(text)


def _agree(own: int | str, world: ProcessGroup, groups: _Groups) -> None:
    """Tell the other ranks this rank's size, or its error, and raise where theirs is another."""
    groups.num_agreements += 1
    store = collectives.store_of(world)
    if store is None:  # MPI's groups have none
        return
    prefix = f"syncbn/group_size/{groups.num_agreements}"
    store.set(f"{prefix}/{world.rank()}", str(own))
    # All ranks had read those of two agreements ago before they came to the last one.
    with contextlib.suppress(RuntimeError):  # of stores that cannot
        store.delete_key(f"syncbn/group_size/{groups.num_agreements - 2}/{world.rank()}")
    if isinstance(own, str):
        return
    for rank in range(world.size()):
        try:
            other = store.get(f"{prefix}/{rank}").decode()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {world.rank()} makes groups of {own} ranks, and rank {rank} did not come to "
                "make them; convert with the same group_size on all ranks"
            ) from error
        if other.isdecimal() and int(other) != own:
            raise ValueError(
                f"expected the same group_size on all ranks, but rank {world.rank()} came with "
                f"{own} and rank {rank} with {other}"
            )
        if not other.isdecimal():
            raise ValueError(f"no groups of {own} ranks were made: {other}")
