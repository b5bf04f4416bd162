"""Messages between ranks: the sums of a pass, sizes, withdrawals, and the words of their errors."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from syncbn import _torch_private, checks, collectives, layout, ops
from syncbn.arguments import Arguments
from syncbn.collectives import ProcessGroup

__all__ = [
    "Layer",
    "check",
    "communication_error",
    "compare_sizes",
    "find_size_mismatch",
    "guard",
    "layer_name",
    "sum_over_ranks",
    "sum_statistics",
    "with_layer_and_rank",
]

# Errors that are raised again, with the layer and the rank in their text.
_REWRITTEN = (TypeError, ValueError, NotImplementedError, RuntimeError, torch.OutOfMemoryError)


class _Named(Protocol):
    _name: str


# A layer in errors: its name, or the layer itself under torch.compile, where reading the name would
# add a guard and compile the graph again for each layer.
Layer = str | _Named


def sum_statistics(
    input: Tensor, group: ProcessGroup | None, layer: Layer, arguments: Arguments | None = None
) -> tuple[Tensor, Tensor]:
    """Return the input, dense, and its message of :func:`syncbn.ops.batch_norm_stats`, summed.

    A rank that fails a check of ``arguments``, if they are given, or runs out of memory withdraws.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`check` and :func:`compare_sizes`.
        RuntimeError: The collective failed.
    """
    with guard(group, layer, input, arguments):
        if arguments is not None:
            checks.check_training(input, arguments, alone=group is None)
        dense = layout.as_dense(input)
        totals = ops.batch_norm_stats(dense)
    if group is not None:
        compare_sizes(totals, group, layer)
        totals = sum_over_ranks(totals, group, layer, "forward")
    return dense, totals


def sum_over_ranks(message: Tensor, group: ProcessGroup, layer: Layer, direction: str) -> Tensor:
    """Sum the ``direction`` message of a layer over the ranks.

    Raises:
        NotImplementedError: In a batch of gradients.
        RuntimeError: The collective failed; the error names the layer and the rank.
    """
    try:
        return collectives.all_reduce_sum(message, group)
    except RuntimeError as error:
        if "Batching rule not implemented" in str(error):
            words = "gradients of several ranks cannot be batched; leave out is_grads_batched=True"
            raise with_layer_and_rank(NotImplementedError(words), layer, group) from error
        raise communication_error(error, group, layer, direction) from error


def check(input: Tensor, arguments: Arguments, group: ProcessGroup | None, layer: Layer) -> None:
    """Make the checks of a training pass; a rank that fails one withdraws."""
    with guard(group, layer, input, arguments):
        checks.check_training(input, arguments, alone=group is None)


class guard:
    """Context in which an error withdraws this rank from the forward pass of the others.

    They fail at once then instead of waiting. The error gets the layer and the rank into its words.
    Belongs around the code before the forward collective, never around the collective. An interrupt
    does not withdraw: it must not wait for the others.
    """

    __slots__ = ("arguments", "group", "input", "layer")

    def __init__(
        self,
        group: ProcessGroup | None,
        layer: Layer,
        input: object,
        arguments: Arguments | None = None,
    ) -> None:
        self.group, self.layer = group, layer
        self.input, self.arguments = input, arguments

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception):
            return
        if self.group is not None:
            _withdraw_if_size_is_known(self.group, self.input, self.arguments)
        if type(error) in _REWRITTEN:
            raise with_layer_and_rank(error, self.layer, self.group) from None


# Sizes: ranks whose messages differ in size crash (gloo) or hang (NCCL) inside the collective.


class _SizesSeen:
    """The message sizes that a group has compared, and how many groups have had its name."""

    def __init__(self, group: ProcessGroup) -> None:
        name = ""
        with contextlib.suppress(RuntimeError):  # torch.distributed gives its groups names
            name = str(group.group_name)
        _groups_named[name] += 1
        self.generation = _groups_named[name]
        self.sizes: list[int] = []


_sizes_seen: WeakKeyDictionary[ProcessGroup, _SizesSeen] = WeakKeyDictionary()
_groups_named: Counter[str] = Counter()


def compare_sizes(message: Tensor, group: ProcessGroup, layer: Layer) -> None:
    """Check that the ranks of a forward pass can meet in its collective.

    Raises:
        NotImplementedError: Under DistributedDataParallel.join(), on all ranks.
        RuntimeError: The ranks cannot compare their sizes.
        ValueError: Another rank's message to this group has another size.
    """
    _check_join(group, layer)
    size = message.numel()
    try:
        other = find_size_mismatch(group, size, message.device)
    except RuntimeError as error:
        raise communication_error(error, group, layer, "forward") from error
    if other is not None:
        _send_withdrawal(group, other, message.device)
        raise ValueError(
            f"expected the same channels on all ranks, but this rank normalizes "
            f"{(size - 1) // 2} while another normalizes {(other - 1) // 2}; the ranks run "
            f"different layers{_layer_and_rank(layer, group)}"
        )


def find_size_mismatch(group: ProcessGroup, size: int, device: torch.device) -> int | None:
    """Before a group's first message of this size, compare it with that of other ranks.

    The first rank to come writes its size to the group's store, the others compare. Asks the store
    once for each new size, sends no collective, and waits for no other rank.

    Ranks compare if they have compared the same sizes before, in the same group (a later one may
    have its name and its store), and if their backends have counted the same number of operations.
    Sends between some ranks make these numbers differ; such ranks do not compare.

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


def _check_join(group: ProcessGroup, layer: Layer) -> None:
    """Raise NotImplementedError in a forward pass under DistributedDataParallel.join().

    A rank that has run out of inputs stands in for the others' gradients there, but not for the
    collectives of a layer: they would wait for it, or take its messages for those of the layer.
    """
    join = _torch_private.join_config()
    if join is not None and join.enable and not join.throw_on_early_termination:
        words = (
            "SyncBatchNorm cannot train under DistributedDataParallel.join(), where a rank that "
            "has run out of inputs does not take part in the layer's all-reduce; give such a rank "
            "empty batches instead, or call join(throw_on_early_termination=True) to end all ranks "
            "together"
        )
        raise with_layer_and_rank(NotImplementedError(words), layer, group)


# Withdrawal: a message whose count is NaN, in place of the one that the other ranks wait for.


def _withdraw_if_size_is_known(
    group: ProcessGroup, input: object, arguments: Arguments | None
) -> None:
    """Send a withdrawal, if parameters, buffers or the input tell the size of the message."""
    vectors: tuple[object, ...] = () if arguments is None else arguments.vectors
    num_features = None if arguments is None else arguments.num_features
    tensors = [tensor for tensor in (*vectors, input) if isinstance(tensor, Tensor)]
    if num_features is None:
        if tensors and tensors[0] is not input and tensors[0].dim() == 1:
            num_features = tensors[0].size(0)
        elif isinstance(input, Tensor) and input.dim() > 1 and not input.is_nested:
            num_features = input.size(1)
    if num_features is not None:
        device = tensors[0].device if tensors else collectives.likely_device(group)
        _send_withdrawal(group, 2 * num_features + 1, device)


def _send_withdrawal(group: ProcessGroup, size: int, device: torch.device) -> None:
    """Take part in the forward collective of the other ranks with a count of NaN.

    An error in here must not hide that of the rank.
    """
    with _no_trace(), contextlib.suppress(RuntimeError, ValueError):
        message = torch.zeros(size, dtype=torch.float64, device=device)
        message[-1] = torch.nan
        collectives.all_reduce_sum(message, group)


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


# Words.


def layer_name(layer: Layer) -> str:
    """Return the name of a layer in its model; empty if unknown."""
    return layer if isinstance(layer, str) else layer._name


def with_layer_and_rank(error: Exception, layer: Layer, group: ProcessGroup | None) -> Exception:
    """Return the error with the layer and the rank at the end of its text."""
    return type(error)(f"{error}{_layer_and_rank(layer, group)}")


def communication_error(
    error: RuntimeError, group: ProcessGroup, layer: Layer, direction: str
) -> RuntimeError:
    """Return the error of a collective that failed, with what may have happened and where."""
    return RuntimeError(
        f"the {direction} all-reduce of a SyncBatchNorm layer failed: another rank has failed, "
        "left, did not come in time or runs another layer; look at the first error of the other "
        "ranks, and run with TORCH_DISTRIBUTED_DEBUG=DETAIL to compare what they do"
        f"{_layer_and_rank(layer, group)}: {error}"
    )


def _layer_and_rank(layer: Layer, group: ProcessGroup | None) -> str:
    """Return which layer and rank this is, in brackets to follow a message; empty if unknown."""
    rank = "" if group is None else f"rank {group.rank()} of {group.size()}"
    name = layer_name(layer)
    known = ", ".join(part for part in (f"layer {name!r}" if name else "", rank) if part)
    return f" [{known}]" if known else ""
