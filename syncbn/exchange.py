"""Messages between ranks besides the sums: sizes, withdrawals, and the words of their errors."""

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from syncbn import checks, collectives, layout
from syncbn.arguments import Arguments
from syncbn.collectives import ProcessGroup

__all__ = [
    "Layer",
    "communication_error",
    "guard",
    "layer_name",
    "meet",
    "prepare",
    "sum_over_ranks",
    "with_place",
]

# Errors that are raised again with the layer and the rank in their text.
_WORDED = (TypeError, ValueError, NotImplementedError, RuntimeError, torch.OutOfMemoryError)


class _Named(Protocol):
    _name: str


# A layer in errors: its name, or in a compiled graph itself. A graph that has read the name does
# not serve another layer, so that it is read where it is said.
Layer = str | _Named


class guard:
    """Inside of it, whatever is raised withdraws this rank from the forward pass of the others.

    They fail at once then instead of waiting. The error gets the layer and the rank into its words.
    Belongs around what comes before the forward collective, and never around the collective.
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
        if error is None:
            return
        if self.group is not None:
            _withdraw(self.group, self.input, self.arguments)
        if type(error) in _WORDED:
            if TYPE_CHECKING:
                assert isinstance(error, Exception)
            raise with_place(error, self.layer, self.group) from None


def prepare(
    input: Tensor, arguments: Arguments, group: ProcessGroup | None, layer: Layer
) -> Tensor:
    """Return the input, dense, after :func:`syncbn.checks.check_training`.

    A rank that fails a check, or runs out of memory, withdraws.
    """
    with guard(group, layer, input, arguments):
        checks.check_no_transform()
        checks.check_training(input, arguments, alone=group is None)
        dense = layout.as_dense(input)
    return dense


def meet(group: ProcessGroup, input: Tensor, layer: Layer) -> None:
    """Check that the ranks of a forward pass can meet in its collective.

    Raises:
        NotImplementedError: Under DistributedDataParallel.join(), on all ranks.
        RuntimeError: The ranks cannot compare their sizes.
        ValueError: Another rank's message to this group has another size.
    """
    try:
        collectives.check_join()
    except NotImplementedError as error:
        raise with_place(error, layer, group) from None
    try:
        other = collectives.find_size_mismatch(group, message_size(input.size(1)), input.device)
    except RuntimeError as error:
        raise communication_error(error, group, layer, "forward") from error
    if other is not None:
        collectives.withdraw(group, other, input.device)
        raise ValueError(
            f"expected the same channels on all ranks, but this rank normalizes "
            f"{input.size(1)} while another normalizes {(other - 1) // 2}; the ranks run "
            f"different layers{_place(layer, group)}"
        )


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
            raise with_place(NotImplementedError(words), layer, group) from error
        raise communication_error(error, group, layer, direction) from error


def layer_name(layer: Layer) -> str:
    """Return the name of a layer in its model; empty if unknown."""
    return layer if isinstance(layer, str) else layer._name


def with_place(error: Exception, layer: Layer, group: ProcessGroup | None) -> Exception:
    """Return the error with the layer and the rank at the end of its text."""
    return type(error)(f"{error}{_place(layer, group)}")


def message_size(channels: int) -> int:
    """Return the number of values that a rank sends forward: csrc/ops.cpp says which."""
    return 2 * channels + 1


def _place(layer: Layer, group: ProcessGroup | None) -> str:
    """Return which layer and rank this is, in brackets to follow a message; empty if unknown."""
    rank = "" if group is None else f"rank {group.rank()} of {group.size()}"
    name = layer_name(layer)
    known = ", ".join(part for part in (f"layer {name!r}" if name else "", rank) if part)
    return f" [{known}]" if known else ""


def communication_error(
    error: RuntimeError, group: ProcessGroup, layer: Layer, direction: str
) -> RuntimeError:
    """Return the error of a collective that failed, with what may have happened and where."""
    return RuntimeError(
        f"the {direction} all-reduce of a SyncBatchNorm layer failed: another rank has failed, "
        "left, did not come in time or runs another layer; look at the first error of the other "
        "ranks, and run with TORCH_DISTRIBUTED_DEBUG=DETAIL to compare what they do"
        f"{_place(layer, group)}: {error}"
    )


def _withdraw(group: ProcessGroup, input: object, arguments: Arguments | None) -> None:
    """Let the other ranks of a forward pass fail, as far as it is known what they wait for."""
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
        collectives.withdraw(group, message_size(num_features), device)
