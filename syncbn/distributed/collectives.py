"""Process groups and their collectives, by torch.distributed.

A forward or backward pass makes one all-reduce, or two if the size of its message has changed: see
negotiation.py.
"""

import functools
import os
import warnings
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import _compat

__all__ = ["DeviceMesh", "ProcessGroup", "Store", "Work"]  # from torch.distributed

# Torch may have been built without torch.distributed.
AVAILABLE = dist.is_available()
if TYPE_CHECKING or AVAILABLE:
    from torch.distributed import (  # type: ignore[attr-defined]
        DeviceMesh,
        ProcessGroup,
        Store,
        Work,
    )
else:
    DeviceMesh = ProcessGroup = Store = Work = Any

_NON_MEMBER = -100  # torch.distributed.new_group returns it on a rank outside of the group


def group_of_mesh(process_group: Any) -> Any:
    """Return the group of a mesh, _NON_MEMBER on a rank outside of it; other objects as they are.

    Raises:
        ValueError: The mesh has more than one dimension.
    """
    if not AVAILABLE or not isinstance(process_group, DeviceMesh):
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
    """Whether :func:`checked_group` accepts the object as a group."""
    try:
        checked_group(process_group)
    except (TypeError, ValueError):
        return False
    return True


def is_process_group(group: object) -> TypeGuard[ProcessGroup]:
    """Whether the object is a process group, and no number of a rank outside of one."""
    return AVAILABLE and isinstance(group, ProcessGroup)


def checked_group(process_group: object) -> ProcessGroup | None:
    """Return the group itself, the group of a mesh, or None for None.

    Raises:
        TypeError: It is neither a group, nor a mesh, nor None.
        ValueError: A mesh has more than one dimension.
    """
    group: Any = group_of_mesh(process_group)
    is_non_member = isinstance(group, int) and group == _NON_MEMBER
    if group is None or is_non_member or is_process_group(group):
        return group  # type: ignore[no-any-return]
    raise TypeError(
        "expected process_group to be a torch.distributed.ProcessGroup, a DeviceMesh or None, but "
        f"got {type(group).__name__}; make one with torch.distributed.new_group(ranks)"
    )


class GroupReference:
    """A layer holds this object in place of its group.

    The reference to a group of torch.distributed is weak. ``destroy_process_group`` then frees the
    group, which closes its connections, and so the other ranks notice. Copies share the object.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._strong: ProcessGroup | None = group  # None for a group of torch.distributed
        if is_process_group(group) and _compat.is_registered(group):
            self._strong, self._weak = None, ref(group)
            self._rank, self._name = group.rank(), name_of(group)  # for the error

    def get(self) -> ProcessGroup:
        """Return the group.

        Raises:
            ValueError: The group was destroyed.
        """
        group = self._weak() if self._strong is None else self._strong
        if group is None:
            raise destroyed(self._rank, self._name)
        return group

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupReference":
        return self


def destroyed(rank: int, name: str) -> ValueError:
    """Return the error for the use of a destroyed group."""
    return ValueError(
        f"rank {rank} is to use the process_group {name!r}, which was destroyed; give the layer "
        "another group, or None for all ranks"
    )


@functools.cache
def warn_without_group() -> None:
    """Warn, once, that training is not synchronized though a launcher has started several ranks."""
    ranks = os.environ.get("WORLD_SIZE", "")
    is_launched = ranks.isdecimal() and int(ranks) > 1 and {"RANK", "MASTER_ADDR"} <= {*os.environ}
    if AVAILABLE and is_launched and not dist.is_initialized():
        warnings.warn(
            f"a SyncBatchNorm layer trains on the batch of this process alone: this is one of "
            f"{ranks} processes (WORLD_SIZE), but torch.distributed is not initialized; call "
            "torch.distributed.init_process_group before the first step",
            stacklevel=3,
        )


# Compilers call it while they trace.
warn_while_tracing = _compat.constant_in_graphs(lambda: warn_without_group())


def resolve_group(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group to synchronize with, or None for a single process.

    Raises:
        TypeError: ``process_group`` is not a group.
        ValueError: This rank is not a member of the group.
    """
    if not AVAILABLE:
        return None
    # An explicit group works without a default group.
    if process_group is None and not dist.is_initialized():
        _ = dist.group.WORLD  # Dynamo guards on it, and takes is_initialized() for a constant
        return None
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, ProcessGroup):
        checked_group(group)
        if isinstance(group, int):
            raise ValueError(
                f"{_this_rank()} is not a member of this layer's process_group: "
                "torch.distributed.new_group, or the mesh, has no group for it. Give each rank a "
                "group that it is in, or do not run this layer on it in training mode"
            )
    if group is None or group.size() > 1:
        return group
    # Dynamo guards on a name that a branch depends on; on torch 2.15 it does not on size().
    return None if name_of(group) else None  # noqa: RUF034


def is_member(process_group: ProcessGroup | None) -> bool:
    """Whether this rank is in the group; on other ranks ``new_group`` returns a number."""
    return not isinstance(process_group, int)


def global_rank(group: ProcessGroup, rank: int) -> int:
    """Return the global rank of a rank of the group."""
    try:
        return dist.get_global_rank(group, rank)
    except ValueError:  # torch.distributed has not made the group
        return rank


def group_named(name: str) -> ProcessGroup:
    """Return the group of this name. Graphs hold names of groups.

    Raises:
        RuntimeError: torch.distributed has no group of this name.
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
    """Return the name of a group in torch.distributed; empty if it has none."""
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
    """Whether the group's collectives compute sums; torch's fake backend computes none."""
    try:
        return bool(dist.get_backend(group) != "fake")
    except (ValueError, RuntimeError):  # torch.distributed has not made the group
        return True


def likely_device(group: ProcessGroup, own: torch.device | None = None) -> torch.device:
    """Return the probable device of the other ranks' tensors.

    It is ``own``, the device of this rank's tensors, if the group has a backend for it.
    """
    backends = _compat.device_types(group)
    if own is not None and (own.type in backends or not backends):  # a group in Python has none
        return own
    for kind in sorted(backends - {"cpu"}):
        if "cpu" not in backends or _compat.is_initialized(kind):
            return torch.device(kind)
    return torch.device("cpu")


# Torch 2.15 refuses to compile code that reads a group's backends.
@_compat.uncompiled
def cuda_backend(group: ProcessGroup) -> str:
    """Return the name of the backend for CUDA tensors, such as "gloo"; empty if there is none."""
    try:
        return _compat.backend_name(group, torch.device("cuda"))
    except (AttributeError, RuntimeError):  # no backend for CUDA, or one without a name
        return ""


# Of torch.distributed.all_reduce, which spends most of its time on other cases. A program that has
# replaced that function, to count or to delay collectives, gets its own one called.
TORCHS_ALL_REDUCE = dist.distributed_c10d.all_reduce if AVAILABLE else None
SUM = dist.AllreduceOptions() if AVAILABLE else None
if SUM is not None:
    SUM.asyncOp = False


def all_reduce_sum(tensor: Tensor, group: ProcessGroup, label: str = "") -> Tensor:
    """Return the sum of ``tensor`` over the group's ranks, and perhaps overwrite ``tensor``.

    A profile shows the collective under the label, if there is one.
    """
    if label:
        with torch.profiler.record_function(label):
            return all_reduce_sum(tensor, group)
    # A dispatch mode may store an operator's result for later: selective checkpointing does.
    if _compat.num_dispatch_modes() > 0:
        if name_of(group):
            return _compat.wait(_compat.all_reduce(tensor, group.group_name))
        with _compat.without_dispatch_modes():
            return all_reduce_sum(tensor.clone(), group)
    dist.all_reduce(tensor, group=group)
    return tensor


def is_of_backend(error: Exception) -> bool:
    """Whether the group's backend has raised the error, such as NCCL."""
    return isinstance(error, dist.DistBackendError)


def start_sum(tensor: Tensor, group: ProcessGroup) -> Work | None:
    """Start a sum whose result this rank does not need; return the object to wait for."""
    return dist.all_reduce(tensor, group=group, async_op=True)  # type: ignore[no-any-return]


# The last comparison's collectives. A thread of gloo frees a collective that nobody else holds, and
# needs the GIL for its tensors. A process that exits just then is aborted: "terminate called
# without an active exception".
_last_works: list[Work | None] = []


def are_equal(digests: list[tuple[ProcessGroup, bytes]]) -> list[bool]:
    """Return for each group whether its ranks gave the same 16 bytes, by one collective for each.

    All collectives start before the first wait: ranks may have different groups.
    """
    started = []
    for group, digest in digests:
        parts = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
        numbers = torch.tensor([parts, [-part for part in parts]], device=likely_device(group))
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group, async_op=True)
        started.append((numbers, work))
    _last_works[:] = [work for _, work in started]
    equal = []
    for numbers, work in started:
        if work is not None:
            work.wait()
        largest, negated = numbers.cpu()
        equal.append(torch.equal(largest, -negated))
    return equal


def gather(value: Any, group: ProcessGroup) -> list[Any]:
    """Return the value of each rank of the group; values must be picklable."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
