"""Withdrawals: messages whose count is NaN, in place of those that other ranks wait for."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from syncbn import _torch_private, agreement, collectives, devices, errors, reports
from syncbn.agreement import history_of
from syncbn.arguments import Arguments
from syncbn.collectives import ProcessGroup, Work
from syncbn.identity import Identity

__all__ = ["between_passes", "from_pass", "send"]


def from_pass(
    error: Exception,
    group: ProcessGroup | None,
    layer: Identity,
    input: object,
    arguments: Arguments | None,
) -> Exception:
    """Withdraw this rank from the pass of the others, which fail at once instead of waiting.

    Belongs to the code before the collective, never to the collective. An interrupt does not
    withdraw: it must not wait for the others.

    Returns:
        The error, with the layer and the rank in its words.
    """
    if group is not None:
        tensors = [] if arguments is None else list(arguments.vectors)
        known = [tensor for tensor in (*tensors, input) if isinstance(tensor, Tensor)]
        device = known[0].device if known else None
        channels = _count_channels(input, arguments)
        size = None if channels is None else agreement.size_of(channels)
        _wait_for(_start(error, group, size, device))
    return errors.with_layer_and_rank(error, layer, group)


def between_passes(error: Exception, groups: Iterable[ProcessGroup]) -> None:
    """Withdraw this rank from whatever the other ranks of these groups do next.

    Belongs to code between passes. Starts in all groups before it waits for any: the others may
    wait in any of them.
    """
    for work in [_start(error, group) for group in groups]:
        _wait_for(work)


# Torch 2.15 refuses to compile code that looks at a group's devices.
@_torch_private.uncompiled
def _start(
    error: Exception,
    group: ProcessGroup,
    size: int | None = None,
    device: torch.device | None = None,
) -> Work | None:
    """Tell why this rank withdraws, and start to do so; ``size`` as of a message, if known."""
    device = devices.of_statistics(collectives.likely_device(group, device))
    history = history_of(group)
    work = None
    # An error in here must not hide that of the rank.
    with (
        _no_trace(),
        _torch_private.without_dispatch_modes(),
        contextlib.suppress(RuntimeError, ValueError),
    ):
        history.num_passes += 1
        words = reports.write_withdrawal(group, history, error)
        size = history.size_to_meet(size, words, group, device)
        if size:
            work = collectives.start_sum(_message(size, device), group)
    history.forget()
    return work


def _wait_for(work: Work | None) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        if work is not None:
            work.wait()


def _count_channels(input: object, arguments: Arguments | None) -> int | None:
    """Return the C of a layer's message, from parameters, buffers or the input."""
    if arguments is not None:
        if arguments.num_features is not None:
            return arguments.num_features
        for vector in arguments.vectors:
            if isinstance(vector, Tensor) and vector.dim() == 1:
                return vector.size(0)
    if isinstance(input, Tensor) and input.dim() > 1 and not input.is_nested:
        return input.size(1)
    return None


def send(group: ProcessGroup, size: int, device: torch.device) -> None:
    """Take part in the collective of the other ranks, with a withdrawal."""
    with contextlib.suppress(RuntimeError, ValueError):
        history_of(group).sum_messages(_message(size, device), group, "")


def _message(size: int, device: torch.device) -> Tensor:
    """Return a message with a count of NaN."""
    message = torch.zeros(size, dtype=torch.float64, device=device)
    message[-4] = torch.nan
    return message


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
