"""Process groups and the all-reduce: the only file that calls torch.distributed's functions.

A forward or backward pass calls :func:`all_reduce_sum` once, or twice where the size of its message
changes: see protocol.py.
"""

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import _compat

__all__ = [
    "DeviceMesh",
    "GroupReference",
    "ProcessGroup",
    "Store",
    "Work",
    "adds_up",
    "all_reduce_sum",
    "are_equal",
    "checked_group",
    "cuda_backend",
    "destroyed",
    "gather",
    "global_rank",
    "group_named",
    "group_of_mesh",
    "is_debugging",
    "is_group",
    "is_member",
    "likely_device",
    "name_of",
    "new_subgroup",
    "resolve_group",
    "start_sum",
    "store_of",
    "world",
]


# A torch that was built without distributed knows no groups.
_AVAILABLE = dist.is_available()
if TYPE_CHECKING or _AVAILABLE:
    from torch.distributed import (  # type: ignore[attr-defined]
        DebugLevel,
        DeviceMesh,
        ProcessGroup,
        Store,
        Work,
        get_debug_level,
    )
else:
    DeviceMesh = ProcessGroup = Store = Work = Any

# Returned by torch.distributed.new_group on a rank that is not a member.
_NON_MEMBER = -100


def group_of_mesh(process_group: Any) -> Any:
    """Return the group of a mesh as new_group returns groups, and anything else as it is.

    Raises:
        ValueError: The mesh has more than one dimension.
    """
    if not _AVAILABLE or not isinstance(process_group, DeviceMesh):
        return process_group
    if process_group.ndim != 1:
        raise ValueError(
            "expected process_group to be a group or a DeviceMesh of one dimension, but got a mesh "
            f"of {process_group.ndim}; pass one of its dimensions, such as mesh['dp']"
        )
    if process_group.get_coordinate() is None:
        return _NON_MEMBER
    return process_group.get_group()


def is_group(process_group: object) -> bool:
    """Whether this is what :func:`checked_group` takes."""
    try:
        checked_group(process_group)
    except TypeError:
        return False
    return True


def checked_group(process_group: object) -> ProcessGroup | None:
    """Return the group: this, or that of the mesh that this is.

    Raises:
        TypeError: It is neither what ``torch.distributed.new_group`` returns nor a mesh nor None.
        ValueError: A mesh has more than one dimension.
    """
    group: Any = group_of_mesh(process_group)
    is_non_member = isinstance(group, int) and group == _NON_MEMBER
    if group is None or is_non_member or (_AVAILABLE and isinstance(group, ProcessGroup)):
        return group  # type: ignore[no-any-return]
    raise TypeError(
        "expected process_group to be a torch.distributed.ProcessGroup, a DeviceMesh or None, but "
        f"got {type(group).__name__}; make one with torch.distributed.new_group(ranks)"
    )


class GroupReference:
    """What a layer and a graph of autograd hold in place of their group.

    A group that torch.distributed has made is held weakly, because a group that nobody holds closes
    its connections as it is destroyed, by which the other ranks hear of it. Copies share it.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._strong: ProcessGroup | None = group
        if _AVAILABLE and isinstance(group, ProcessGroup) and _compat.is_registered(group):
            self._strong = None
            self._weak = ref(group)
            self._rank, self._name = group.rank(), name_of(group)

    def get(self) -> ProcessGroup:
        """Return the group.

        Raises:
            ValueError: It was destroyed.
        """
        group = self._weak() if self._strong is None else self._strong
        if group is None:
            raise destroyed(self._rank, self._name)
        return group

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupReference":
        return self


def destroyed(rank: int, name: str) -> ValueError:
    """Return the error of a rank that is to use a group which was destroyed."""
    return ValueError(
        f"rank {rank} is to use the process_group {name!r}, which was destroyed; give the layer "
        "another group, or None for all ranks"
    )


def world() -> ProcessGroup | None:
    """Return the group of all ranks; None where torch.distributed is not initialized."""
    return dist.group.WORLD if _AVAILABLE and dist.is_initialized() else None


def new_subgroup(size: int) -> ProcessGroup:
    """Return this rank's group of ``size`` neighbors; all ranks call it, ``size`` divides them."""
    group, _ = dist.new_subgroups(size)
    return group  # type: ignore[no-any-return]


def resolve_group(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group to synchronize with, or None where this process is alone.

    Raises:
        TypeError: It is not a group.
        ValueError: This rank is not a member of the group.
    """
    # A group that is given needs no default group beside it.
    if not _AVAILABLE or (process_group is None and not dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, ProcessGroup):
        checked_group(group)
    if isinstance(group, int):
        raise ValueError(
            f"{_this_rank()} is not a member of this layer's process_group: "
            "torch.distributed.new_group, or the mesh, has no group for it. Give each rank a group "
            "that it is in, or do not run this layer on it in training mode"
        )
    return group if group is not None and group.size() > 1 else None


def is_member(process_group: ProcessGroup | None) -> bool:
    """Whether this rank is in the group, which may be what ``new_group`` returns to others."""
    return not isinstance(process_group, int)


def global_rank(group: ProcessGroup, rank: int) -> int:
    """Return the number that a rank of the group has among all ranks."""
    try:
        return dist.get_global_rank(group, rank)
    except ValueError:  # a group that torch.distributed has not made
        return rank


def group_named(name: str) -> ProcessGroup:
    """Return the group of this name, which a graph holds in place of the group.

    Raises:
        RuntimeError: torch.distributed knows no group of this name.
    """
    try:
        return _compat.resolve_process_group(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"{_this_rank()} is to use a group of the name {name!r}, which torch.distributed does "
            "not know; a compiled or exported layer needs a process group that "
            "torch.distributed.new_group has made and that was not destroyed"
        ) from error


def _this_rank() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"


def name_of(group: ProcessGroup) -> str:
    """Return the name that torch.distributed has given a group; empty if it has none."""
    try:
        return str(group.group_name)
    except (AttributeError, RuntimeError, ValueError):
        return ""


def store_of(group: ProcessGroup) -> Store | None:
    """Return the store of a group; None if it has none."""
    try:
        return group.get_group_store()  # MPI's is None
    except RuntimeError:
        return None


def adds_up(group: ProcessGroup) -> bool:
    """Whether the group's collectives compute: those of torch's fake backend do not."""
    try:
        return bool(dist.get_backend(group) != "fake")
    except (ValueError, RuntimeError):  # a group that torch.distributed has not made
        return True


def is_debugging() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks for details."""
    return bool(get_debug_level() != DebugLevel.OFF)


def likely_device(group: ProcessGroup, own: torch.device | None = None) -> torch.device:
    """Return where the other ranks' tensors probably are.

    That is where this rank's ``own`` are, unless it has none or the group has backends for other
    devices alone.
    """
    backends = _compat.device_types(group)
    if own is not None and (own.type in backends or not backends):  # none: written in Python
        return own
    for kind in sorted(backends - {"cpu"}):
        if "cpu" not in backends or _compat.is_initialized(kind):
            return torch.device(kind)
    return torch.device("cpu")


# Torch 2.15 refuses to compile code that looks at a group's backends.
@_compat.uncompiled
def cuda_backend(group: ProcessGroup) -> str:
    """Return the name of the backend for CUDA tensors, such as "gloo"; empty if there is none."""
    try:
        return _compat.backend_name(group, torch.device("cuda"))
    except (AttributeError, RuntimeError):  # no backend for CUDA, or one without a name
        return ""


def all_reduce_sum(tensor: Tensor, group: ProcessGroup, label: str = "") -> Tensor:
    """Return the sum of ``tensor`` over the group's ranks; ``tensor`` itself may be overwritten.

    Profiles show the collective under the label, if any.
    """
    if label:
        with torch.profiler.record_function(label):
            return all_reduce_sum(tensor, group)
    # A dispatch mode, such as selective checkpointing's, may keep an operator's result for later.
    if _compat.num_dispatch_modes() > 0 and name_of(group):
        return _compat.wait(_compat.all_reduce(tensor, group.group_name))
    dist.all_reduce(tensor, group=group)
    return tensor


def start_sum(tensor: Tensor, group: ProcessGroup) -> Work | None:
    """Start to take part in a sum, whose result is not needed; return what can be waited for."""
    return dist.all_reduce(tensor, group=group, async_op=True)  # type: ignore[no-any-return]


def are_equal(digests: list[tuple[ProcessGroup, bytes]]) -> list[bool]:
    """Return for each group whether its ranks gave the same 16 bytes; one collective for each.

    All are started before one is waited for: ranks may have different groups.
    """
    started = []
    for group, digest in digests:
        parts = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
        numbers = torch.tensor([parts, [-part for part in parts]], device=likely_device(group))
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group, async_op=True)
        started.append((numbers, work))
    equal = []
    for numbers, work in started:
        if work is not None:
            work.wait()
        largest, negated = numbers.cpu()
        equal.append(torch.equal(largest, -negated))
    return equal


def gather(value: Any, group: ProcessGroup) -> list[Any]:
    """Return what each rank of the group gives: anything that can be pickled."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
