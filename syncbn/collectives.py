"""The only file that talks to torch.distributed: groups, the all-reduce, and its bare messages.

A forward or backward pass makes one call of :func:`all_reduce_sum`.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import _torch_private

__all__ = [
    "AllReduceSum",
    "ProcessGroup",
    "all_reduce_sum",
    "check_join",
    "check_process_group",
    "find_size_mismatch",
    "group_named",
    "likely_device",
    "resolve_group",
    "withdraw",
]

# A torch that was built without distributed knows no groups.
_AVAILABLE = dist.is_available()
if TYPE_CHECKING or _AVAILABLE:
    from torch.distributed import ProcessGroup
else:
    ProcessGroup = Any

# Returned by torch.distributed.new_group on a rank that is not a member.
_NON_MEMBER = -100


class _SizesSeen:
    """The message sizes that a group has compared, and which group of its name it is."""

    def __init__(self, group: ProcessGroup) -> None:
        name = ""
        with contextlib.suppress(RuntimeError):  # torch.distributed gives its groups names
            name = str(group.group_name)
        _groups_named[name] += 1
        self.generation = _groups_named[name]
        self.sizes: list[int] = []


_sizes_seen: WeakKeyDictionary[ProcessGroup, _SizesSeen] = WeakKeyDictionary()
_groups_named: Counter[str] = Counter()


def check_process_group(process_group: object) -> None:
    """Raise TypeError unless this is what ``torch.distributed.new_group`` returns, or None."""
    if process_group is None or (isinstance(process_group, int) and process_group == _NON_MEMBER):
        return
    if not _AVAILABLE or not isinstance(process_group, ProcessGroup):
        kind = type(process_group).__name__
        instead = "make one with torch.distributed.new_group(ranks)"
        if kind == "DeviceMesh":
            instead = "pass that of one of its dimensions, mesh.get_group(dimension)"
        raise TypeError(
            "expected process_group to be a torch.distributed.ProcessGroup or None, but got "
            f"{kind}; {instead}"
        )


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
        check_process_group(group)
    if isinstance(group, int):
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of this layer's process_group: "
            "torch.distributed.new_group returned no group for it. Give each rank a group that it "
            "is in, or do not run this layer on it in training mode"
        )
    return group if group is not None and group.size() > 1 else None


def group_named(name: str) -> ProcessGroup:
    """Return the group of this name, which a graph holds in place of the group.

    Raises:
        RuntimeError: torch.distributed knows no group of this name.
    """
    try:
        return _torch_private.resolve_process_group(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"torch.distributed knows no group of the name {name!r}; a compiled or exported layer "
            "needs a process group that torch.distributed.new_group has made"
        ) from error


def likely_device(group: ProcessGroup) -> torch.device:
    """Return where the other ranks' tensors probably are, for a rank that has none of its own."""
    backends = _torch_private.device_types(group)
    on_cuda = "cuda" in backends and ("cpu" not in backends or torch.cuda.is_initialized())
    return torch.device("cuda" if on_cuda else "cpu")


def check_join() -> None:
    """Raise NotImplementedError in a forward pass under DistributedDataParallel.join().

    A rank that has run out of inputs stands in for the others' gradients there, but not for the
    collectives of a layer: they would wait for it, or take its messages for those of the layer.
    """
    join = _torch_private.join_config()
    if join is not None and join.enable and not join.throw_on_early_termination:
        raise NotImplementedError(
            "SyncBatchNorm cannot train under DistributedDataParallel.join(), where a rank that "
            "has run out of inputs does not take part in the layer's all-reduce; give such a rank "
            "empty batches instead, or call join(throw_on_early_termination=True) to end all ranks "
            "together"
        )


def all_reduce_sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of ``tensor`` over the group's ranks; ``tensor`` itself may be overwritten."""
    # A dispatch mode, such as selective checkpointing's, may keep an operator's result for later.
    if _torch_private.num_dispatch_modes() > 0:
        return _torch_private.wait(_torch_private.all_reduce(tensor, group.group_name))
    dist.all_reduce(tensor, group=group)
    return tensor


def find_size_mismatch(group: ProcessGroup, size: int, device: torch.device) -> int | None:
    """Before a group's first message of this size, compare it with what other ranks send.

    Ranks whose messages differ in size crash (gloo) or hang (NCCL) inside the collective. The
    group's store tells beforehand: the first rank to come writes its size, the others compare.
    Never waits, and sends no collective.

    Ranks compare if they have compared the same sizes before, in the same group (a later one may
    have its name and its store), and if their backend has counted as many operations. The count
    keeps apart the ranks of which some compile, which do not compare; where it differs for another
    reason, such as sends between some of them, ranks do not compare.

    Returns:
        The size that another rank sends, if it differs.
    """
    seen = _sizes_seen.get(group)
    if seen is None:
        seen = _sizes_seen[group] = _SizesSeen(group)
    if size in seen.sizes:
        return None
    compared = "-".join(map(str, seen.sizes))
    seen.sizes.append(size)
    try:
        number = _torch_private.count_operations(group, device)
    except RuntimeError:  # a backend that does not number its collectives
        return None
    store = group.get_group_store()
    if store is None:  # MPI has none
        return None
    key = f"syncbn/{seen.generation}/{number}/{compared}"
    first = int(store.compare_set(key, "", str(size)))
    return None if first == size else first


def withdraw(group: ProcessGroup, size: int, device: torch.device) -> None:
    """Take part in the forward collective of the other ranks with a count of NaN.

    A rank that found its input bad calls this before it raises, so that the others fail at once
    with words instead of waiting for it. An error in here must not hide the first one.
    """
    with _no_trace(), contextlib.suppress(RuntimeError, ValueError):
        message = torch.zeros(size, dtype=torch.float64, device=device)
        message[-1] = torch.nan
        all_reduce_sum(message, group)


@contextlib.contextmanager
def _no_trace() -> Iterator[None]:
    """Suspend torch.jit.trace, which refuses what it does not know."""
    state = _torch_private.jit_tracing_state()
    if state is None:  # where it cannot be set, as inside of an operator
        yield
        return
    _torch_private.set_jit_tracing_state(None)
    try:
        yield
    finally:
        _torch_private.set_jit_tracing_state(state)


class AllReduceSum(torch.autograd.Function):
    """The sum over the group's ranks, differentiable to any order: its gradient is itself."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        """Sum a copy of ``tensor`` over the ranks."""
        ctx.group = group
        return all_reduce_sum(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients over the ranks."""
        return AllReduceSum.apply(grad, ctx.group), None
