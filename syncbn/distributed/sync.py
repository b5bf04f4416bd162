"""Messages between ranks: the sums of a pass."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn import _compat, ops
from syncbn.distributed import collectives, errors, protocol
from syncbn.distributed.collectives import GroupReference, ProcessGroup, Work
from syncbn.distributed.layer_id import ANONYMOUS, Identity
from syncbn.distributed.protocol import STEP, Record, history_of
from syncbn.ops import checks, masks, tensors
from syncbn.ops.arguments import Arguments
from syncbn.ops.epilogue import EpilogueGradient

__all__ = [
    "PATIENCE",
    "between_passes",
    "check",
    "each_rank",
    "from_pass",
    "group_held",
    "group_named",
    "hear",
    "judge",
    "judge_for",
    "judge_late",
    "judge_now",
    "send",
    "settle",
    "start_backward",
    "start_forward",
    "sum_of",
    "sum_over_ranks",
    "sum_statistics",
    "sum_values",
    "wait",
]


# For ranks whose host has heard nothing yet, as it is busy elsewhere.
PATIENCE = timedelta(seconds=5)


def from_pass(
    error: Exception,
    group: ProcessGroup | None,
    layer: Identity,
    input: object,
    arguments: Arguments | None,
) -> Exception:
    """Abort this rank from the pass of the others, which fail at once instead of waiting.

    Belongs to the code before the collective, never to the collective. An interrupt does not
    abort: it must not wait for the others.

    Returns:
        The error, with the layer and the rank in its words.
    """
    if group is not None:
        listed = [] if arguments is None else list(arguments.vectors)
        known = [tensor for tensor in (*listed, input) if isinstance(tensor, Tensor)]
        device = known[0].device if known else None
        channels = _count_channels(input, arguments)
        size = None if channels is None else protocol.size_of(channels)
        _finish(_start(error, group, size, device))
    return errors.with_layer_and_rank(error, layer, group)


def between_passes(error: Exception, groups: Iterable[ProcessGroup]) -> None:
    """Abort this rank from whatever the other ranks of these groups do next.

    Belongs to code between passes. Starts in all groups before it waits for any: the others may
    wait in any of them.
    """
    for started in [_start(error, group) for group in groups]:
        _finish(started)


class _Started(NamedTuple):
    group: ProcessGroup
    device: torch.device
    words: str
    work: Work | None
    hears_late: bool  # the others do


# Torch 2.15 refuses to compile code that looks at a group's devices.
@_compat.uncompiled
def _start(
    error: Exception,
    group: ProcessGroup,
    size: int | None = None,
    device: torch.device | None = None,
) -> _Started:
    """Tell why this rank aborts, and start to do so; ``size`` as of a message, if known."""
    device = tensors.of_statistics(collectives.likely_device(group, device))
    history = history_of(group)
    is_late = history.is_late(device)
    words, work, has_failed = "", None, False
    # An error in here must not hide that of the rank.
    with (
        _no_trace(),
        _compat.without_dispatch_modes(),
        contextlib.suppress(RuntimeError, ValueError),
    ):
        # Some rank has failed before, and waits in no pass for this one.
        has_failed = history.is_apart or history.noted() != 0
        if not has_failed:
            history.num_passes += 1
            words = protocol.write_abort(group, history, error)
            size = history.size_to_meet(size, words, group, device)
            history.sizes_sent.append(size)
            if size:
                work = collectives.start_sum(_message(size, device), group)
    history.forget()
    return _Started(group, device, words, work, is_late and (has_failed or work is not None))


@_compat.uncompiled
def _finish(started: _Started) -> None:
    """Wait until the others have heard that this rank aborts."""
    group, device, words, work, hears_late = started
    with contextlib.suppress(RuntimeError, ValueError):
        if hears_late:
            settle(group, device, words)
        elif work is not None:
            work.wait()


# Ranks over NCCL, which hear of a failure when their hosts have gone on.


class Stop(NamedTuple):
    """How far the host of a rank had come when it heard of a failure, and why the rank failed."""

    num_passes: int
    num_others: int  # collectives in the group that are not of passes
    sizes: list[int]  # of the latest messages
    words: str

    @classmethod
    def parse(cls, text: bytes) -> "Stop":
        """Return what :meth:`encode` was made of."""
        numbers, others, sizes, words = text.decode().split(" ", 3)
        return cls(int(numbers), int(others), [int(size) for size in sizes.split(",")], words)

    def encode(self) -> str:
        """Return it as text, for the store."""
        sizes = ",".join(map(str, self.sizes))
        return f"{self.num_passes} {self.num_others} {sizes} {self.words}"


class Settled(NamedTuple):
    """What a rank learns from the others after a failure."""

    cause: str  # the error of a rank that has aborted, if any
    hindrance: str  # why not all ranks have made as many passes; empty if they have


def hear(group: ProcessGroup, device: torch.device) -> Settled:
    """Take note of the failure that operators on CUDA have noted."""
    history = history_of(group)
    if history.is_late(device):
        settled: Settled = settle(group, device)
        return settled
    for status in history.statuses.values():
        status.clear()
    report = protocol.read_abort(group, history)  # all ranks have made as many passes
    return Settled("" if report is None else f"rank {report.rank}: {report.words}", "")


@_compat.uncompiled
def settle(
    group: ProcessGroup,
    device: torch.device,
    words: str = "",
    patience: timedelta | None = PATIENCE,
) -> Settled:
    """Have all ranks make as many passes, after a failure that they heard of at different ones.

    Each says how far it has come, and those that are behind send aborts, for which the devices
    of the others wait. Without ``patience`` the others have the time of the group's store. If they
    do not come, this rank makes no pass before they have.
    """
    history = history_of(group)
    history.is_apart = True
    for status in history.statuses.values():
        status.clear()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return Settled("", "a graph is being captured")
    try:
        stops = _exchange_stops(group, device, words, patience)
    except RuntimeError as error:
        return Settled("", f"the group's store failed: {error}")
    cause = next((f"rank {r}: {stop.words}" for r, stop in stops.items() if stop.words), "")
    absent = {*range(group.size())} - {*stops}
    if absent:
        return Settled(cause, f"rank {min(absent)} has not heard of it yet")
    ahead = max(stops.values())
    num_behind = ahead.num_passes - history.num_passes
    if num_behind > len(ahead.sizes) or len({stop.num_others for stop in stops.values()}) > 1:
        return Settled(
            cause,
            "ranks have gone on to collectives that are not of SyncBatchNorm layers, such as "
            "those of DistributedDataParallel",
        )
    for size in ahead.sizes[len(ahead.sizes) - num_behind :]:
        if size:
            collectives.start_sum(_message(size, device), group)
    history.num_passes = ahead.num_passes
    history.num_settled += 1
    history.is_apart = False
    return Settled(cause, "")


def _exchange_stops(
    group: ProcessGroup, device: torch.device, words: str, patience: timedelta | None
) -> dict[int, Stop]:
    """Return the stops of the ranks that have come in time, by rank."""
    history, store = history_of(group), collectives.store_of(group)
    if store is None:
        raise RuntimeError("it has none")
    keys = [f"{history.prefix}/failure {history.num_settled}/{r}" for r in range(group.size())]
    if not store.check([keys[group.rank()]]):
        num_others = 0
        with contextlib.suppress(RuntimeError):  # of a backend that does not count them
            num_others = collectives.count_operations(group, device) - history.num_passes
        stop = Stop(history.num_passes, num_others, [*history.sizes_sent], words)
        store.set(keys[group.rank()], stop.encode())
    with contextlib.suppress(RuntimeError):  # the time has passed
        store.wait(keys, *([] if patience is None else [patience]))
    return {r: Stop.parse(store.get(key)) for r, key in enumerate(keys) if store.check([key])}


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
    """Take part in the collective of the other ranks, with a abort."""
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
    state = _compat.jit_tracing_state()
    if state is None:  # where it cannot be set, as inside of an operator
        yield
        return
    _compat.set_jit_tracing_state(None)
    try:
        yield
    finally:
        _compat.set_jit_tracing_state(state)


def group_named(name: str | None, layer: Identity) -> ProcessGroup | None:
    """Return the group of a layer in a graph; None for None.

    Raises:
        RuntimeError: As :func:`syncbn.distributed.collectives.group_named`; the error names the
            layer.
    """
    if name is None:
        return None
    try:
        return collectives.group_named(name)
    except RuntimeError as error:
        raise errors.with_layer_and_rank(error, layer, None) from error.__cause__


def group_held(reference: GroupReference | None, layer: Identity) -> ProcessGroup | None:
    """Return the group that a layer, or its pass, holds; None for None.

    Raises:
        ValueError: It was destroyed; the error names the layer.
    """
    if reference is None:
        return None
    try:
        return reference.get()
    except ValueError as error:
        raise errors.with_layer_and_rank(error, layer, None) from None


# A pass: its message, whether the ranks can meet, the sum.


def sum_statistics(
    input: Tensor,
    group: ProcessGroup | None,
    layer: Identity,
    arguments: Arguments | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Record | None]:
    """Return the input, dense, its message summed, and the record of the pass in the group.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As :func:`start_forward` and
            :func:`sum_over_ranks`.
    """
    dense, message, record = start_forward(input, group, layer, arguments, mask)
    return dense, sum_over_ranks(message, group, record), record


def start_forward(
    input: Tensor,
    group: ProcessGroup | None,
    layer: Identity,
    arguments: Arguments | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Record | None]:
    """Return the input, dense, its message of :func:`syncbn.ops.batch_norm_stats`, and the record.

    A rank that fails a check of ``arguments``, if they are given, or runs out of memory aborts.
    ``mask`` is that of :func:`syncbn.ops.masks.as_places`.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`check`; another rank's message has
            another size; in DistributedDataParallel.join().
        RuntimeError: The ranks run different passes; another rank has aborted or left.
    """
    _look_back(group)
    try:
        if arguments is not None:
            checks.check_training(input, arguments, alone=group is None)
        dense = tensors.as_dense(input)
        if group is None:
            return dense, ops.batch_norm_stats(dense, mask=mask), None
        record = history_of(group).record(layer, _compat.forward_direction())
        message = ops.batch_norm_stats(dense, record.fingerprint, record.next_size, mask=mask)
    except Exception as error:
        raise from_pass(error, group, layer, input, arguments) from None
    _check_join(group, layer)
    _enter(message, group, record)
    return dense, message, record


def start_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    group: ProcessGroup | None,
    layer: Identity,
    through: EpilogueGradient | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Record | None]:
    """Return grad_output, dense; the results of batch_norm_backward_reduce; and the record.

    Where dz is stored, it takes the place of grad_output. A rank that runs out of memory aborts.

    Raises:
        RuntimeError: As :func:`start_forward`.
    """
    _look_back(group)
    try:
        input = tensors.as_dense(input)
        grad_output = tensors.as_dense(grad_output, like=input)
        record = None
        if group is not None:
            record = history_of(group).record(layer, "backward")
        tail = (None, 0.0) if record is None else (record.fingerprint, record.next_size)
        operands = (grad_output, input, mean, invstd, weight_dtype, bias_dtype, *tail)
        if through is None:
            sums, *gradients = ops.batch_norm_backward_reduce(*operands, mask=mask)
        elif not through.is_stored(input):
            sums, *gradients = ops.batch_norm_backward_reduce(
                *operands, *through.for_operators(), mask=mask
            )
        else:
            sums, *gradients, grad_output = ops.batch_norm_backward_reduce_dz(
                *operands, *through.for_operators(), through.residual, through.output, mask=mask
            )
    except Exception as error:
        raise from_pass(error, group, layer, input, None) from None
    if group is not None and record is not None:
        _enter(sums, group, record)
    grad_weight, grad_bias = gradients
    return grad_output, sums, grad_weight, grad_bias, record


class _SumOverRanks(torch.autograd.Function):
    """The sum over the group's ranks, differentiable to any order: its gradient is itself."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup, layer: Identity) -> Tensor:
        """Sum a vector over the ranks."""
        ctx.group, ctx.layer = GroupReference(group), layer
        return sum_values(values, group, layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradients over the ranks."""
        group = group_held(ctx.group, ctx.layer)
        return _SumOverRanks.apply(grad, group, ctx.layer), None, None


def sum_of(group: ProcessGroup | None, layer: Identity) -> Callable[[Tensor], Tensor]:
    """Return the function that sums a vector over the ranks and can be differentiated."""
    if group is None:
        return lambda values: values
    return lambda values: _SumOverRanks.apply(values, group, layer)


def sum_values(values: Tensor, group: ProcessGroup, layer: Identity) -> Tensor:
    """Sum a vector over the ranks for a backward pass that is itself to be differentiated.

    Raises:
        NotImplementedError, RuntimeError: As :func:`sum_over_ranks`.
    """
    _look_back(group)
    record = history_of(group).record(layer, "double backward")
    statistics = values.to(tensors.of_statistics(values.device)).to(torch.float64)
    end = statistics.new_tensor([0.0, record.fingerprint, record.next_size, record.next_size**2])
    message = torch.cat([statistics, end])
    _enter(message, group, record)
    totals = sum_over_ranks(message, group, record)
    unsound = judge(totals, group, record)
    if unsound is not None:
        totals = torch.where(unsound, torch.nan, totals)
    return totals[:-4].to(values.dtype).to(values.device)


def each_rank(flag: bool, group: ProcessGroup, layer: Identity, device: torch.device) -> list[bool]:
    """Return the flag of each rank of the group: a step between passes of layers.

    Raises:
        RuntimeError: As :func:`sum_over_ranks`; the ranks do not all make this step, or another
            rank has aborted.
    """
    _look_back(group)
    record = history_of(group).record(layer, STEP)
    flags = [0.0] * group.size()
    flags[group.rank()] = float(flag)
    end = [0.0, record.fingerprint, record.next_size, record.next_size**2]
    place = tensors.of_statistics(device)
    message = torch.tensor([*flags, *end], dtype=torch.float64, device=place)
    _enter(message, group, record)
    totals = judge_now(sum_over_ranks(message, group, record), group, record)
    return [value != 0 for value in totals[:-4].tolist()]


def sum_over_ranks(message: Tensor, group: ProcessGroup | None, record: Record | None) -> Tensor:
    """Sum the message of a pass over the ranks; what they say at its end is not looked at.

    Raises:
        NotImplementedError: In a batch of gradients.
        RuntimeError: The collective failed; the error names the layer and the rank.
    """
    if group is None or record is None:
        return message
    try:
        history = record.history
        totals = history.sum_messages(message, group, record.label if history.labels else "")
    except (RuntimeError, ValueError) as error:
        raise errors.of_collective(error, group, record) from error
    history.hear(record, totals)
    return totals


def wait(reduced: Tensor, group: ProcessGroup, record: Record) -> Tensor:
    """Wait for a collective that a graph has started; otherwise as :func:`sum_over_ranks`."""
    try:
        totals = _compat.wait(reduced)
    except RuntimeError as error:
        raise errors.of_collective(error, group, record) from error
    record.history.hear(record, totals)
    return totals


def _enter(message: Tensor, group: ProcessGroup, record: Record) -> None:
    """Go on if the other ranks are to send messages of the same size, as far as is known."""
    history = record.history
    try:
        other = history.enter(record, message.numel(), group, message.device)
    except (ops.PassesDifferError, ops.AbortedError) as error:
        raise errors.of_pass(error, record.layer, group, record) from None
    except (RuntimeError, ValueError) as error:
        raise errors.of_collective(error, group, record) from error
    if other is None:
        return
    different = errors.of_report(other, group, record)
    history.sizes_sent[-1] = other.size
    try:
        if other.size:
            words = protocol.write_abort(group, history, different)
            send(group, other.size, message.device)
            if history.is_late(message.device):
                settle(group, message.device, words)
        raise different
    finally:
        del different  # a frame that holds an error of its own keeps its callers alive, and a group


def _check_join(group: ProcessGroup, layer: Identity) -> None:
    """Raise NotImplementedError in a forward pass under DistributedDataParallel.join().

    A rank that has run out of inputs stands in for the others' gradients there, but not for the
    collectives of a layer: they would wait for it, or take its messages for those of the layer.
    """
    join = _compat.join_config()
    if join is not None and join.enable and not join.throw_on_early_termination:
        words = (
            "SyncBatchNorm cannot train under DistributedDataParallel.join(), where a rank that "
            "has run out of inputs does not take part in the layer's all-reduce; give such a rank "
            "empty batches instead, or call join(throw_on_early_termination=True) to end all ranks "
            "together"
        )
        raise errors.with_layer_and_rank(NotImplementedError(words), layer, group)


# Statuses: whether all ranks have made the same pass and none has aborted.


def judge(totals: Tensor, group: ProcessGroup | None, record: Record | None) -> Tensor | None:
    """Raise RuntimeError unless all ranks have made this pass, as far as the sums have values.

    Returns:
        On CUDA, which is not waited for, whether they are not sound, which is noted.
    """
    if group is None or record is None:
        return None
    if not _has_values(totals):
        if type(totals) is not Tensor or not totals.is_cuda:
            return None
        end = torch.cat([totals.new_zeros(2), totals[-4:]])  # as of a pass of one channel
        return judge_late(end, *judge_for(end, group, record))[-1].isnan()
    record = _pass_of(totals, group, record)
    try:
        with _compat.without_dispatch_modes():
            protocol.check_sound(totals, record.history.sum_of(record.fingerprint, group))
    except (ops.PassesDifferError, ops.AbortedError) as error:
        raise errors.of_pass(error, record.layer, group, record) from None
    return None


def judge_now(totals: Tensor, group: ProcessGroup | None, record: Record | None) -> Tensor:
    """Return the sums on the CPU, after :func:`judge`; waits for the device.

    Raises:
        RuntimeError: As :func:`judge`.
    """
    device, totals = totals.device, totals.cpu()
    try:
        judge(totals, group, record)
    except RuntimeError:
        if group is not None and history_of(group).is_late(device):
            settle(group, device)  # with those that have heard of it, or are to
        raise
    return totals


def judge_for(
    totals: Tensor, group: ProcessGroup | None, record: Record | None
) -> tuple[float | None, Tensor | None]:
    """Return ``fingerprint_sum`` and ``status`` of the operators that take sums over all ranks."""
    if group is None or record is None:
        return None, None
    if record.direction == "recomputation" and _compat.num_dispatch_modes() > 0:
        if not _has_values(totals):
            return None, None
        record = _pass_of(totals, group, record)
    history = record.history
    fingerprint_sum = history.sum_of(record.fingerprint, group)
    if not totals.is_cuda:
        return fingerprint_sum, None
    history.num_judged = round(fingerprint_sum / record.fingerprint)
    return fingerprint_sum, history.status(totals.device).note


def _has_values(totals: Tensor) -> bool:
    """Whether the sums can be looked at: not on meta, nor on CUDA, which is not waited for."""
    return type(totals) is Tensor and not (totals.is_cuda or totals.is_meta)


def _pass_of(totals: Tensor, group: ProcessGroup, record: Record) -> Record:
    """Return the record of the pass that the sums are of.

    A recomputation may get those of the forward pass, which a mode or a compiler has kept.
    """
    if record.direction == "recomputation":
        first = record.history.record(record.layer, "forward")
        with _compat.without_dispatch_modes():
            if totals[-3] == record.history.sum_of(first.fingerprint, group):
                return first
    return record


def judge_late(totals: Tensor, fingerprint_sum: float | None, status: Tensor | None) -> Tensor:
    """Return all but the tail of sums on CUDA, or NaN if they are not sound.

    The operator that finds out notes its status, which the next pass of the group reads.
    """
    no_input = totals.new_empty((0, protocol.channels_of(totals.size(0))))
    *_, count = ops.batch_norm_apply(
        no_input, totals, None, None, None, None, None, 0.0, 0.0, fingerprint_sum, status
    )
    return torch.where(count.isnan(), torch.nan, totals[:-3])


def _look_back(group: ProcessGroup | None) -> None:
    """Raise RuntimeError if an earlier pass of the group on CUDA was not sound.

    Where the host does not wait for the device, it reads here what the operators have found since.
    This rank makes no message of this pass: no other waits for it, but over NCCL those whose hosts
    have gone further, which get aborts.
    """
    if group is None:
        return
    history = history_of(group)
    if not history.is_apart and not history.statuses:
        return
    device = collectives.likely_device(group)
    if history.is_apart:
        hindrance = settle(group, device, patience=None).hindrance
        if hindrance:
            words = (
                "an earlier pass failed, and since then the ranks may have made different numbers "
                f"of passes: {hindrance}; call destroy_process_group(), then init_process_group()"
            )
            raise errors.with_layer_and_rank(RuntimeError(words), ANONYMOUS, group)
    found = history.noted()
    if found == 0:
        return
    failed = protocol.describe(round(abs(found) / history.num_judged), history)
    cause, hindrance = hear(group, device)
    history.records.clear()  # they hold what has followed in that pass
    history.forget()
    what = (
        "another rank of the process group aborted it because of an error"
        if found < 0
        else "another rank made another pass in its place"
    )
    words = (
        f"{failed} gave NaN: {what}{cause and f'; {cause}'}; said in a "
        "later pass because the host does not wait for CUDA: it may be hundreds of launches ahead "
        "of the device, and what it has launched since then gave NaN or sums that belong to no pass"
    )
    if hindrance:
        words += f"; the ranks are not in step yet: {hindrance}"
    raise errors.with_layer_and_rank(RuntimeError(words), ANONYMOUS, group)


def check(
    input: Tensor, arguments: Arguments, group: ProcessGroup | None, layer: Identity
) -> Tensor | None:
    """Make the checks of a training pass; a rank that fails one aborts.

    Returns:
        The mask, if there is one, as operators take it.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`syncbn.ops.checks.check_training`.
    """
    try:
        checks.check_training(input, arguments, alone=group is None)
        return None if arguments.mask is None else masks.as_places(arguments.mask, input)
    except Exception as error:
        raise from_pass(error, group, layer, input, arguments) from None
