"""Messages between ranks: the sums of a pass."""

import torch
from torch import Tensor

from syncbn import (
    _torch_private,
    agreement,
    checks,
    collectives,
    devices,
    errors,
    layout,
    masks,
    ops,
    reports,
    tracing,
    withdrawals,
)
from syncbn.activations import Through
from syncbn.agreement import STEP, Record, history_of
from syncbn.arguments import Arguments
from syncbn.collectives import GroupReference, ProcessGroup
from syncbn.identity import ANONYMOUS, Identity

__all__ = [
    "check",
    "each_rank",
    "group_held",
    "group_named",
    "judge",
    "judge_for",
    "judge_late",
    "judge_now",
    "start_backward",
    "start_forward",
    "sum_over_ranks",
    "sum_statistics",
    "sum_values",
    "wait",
]


def group_named(name: str | None, layer: Identity) -> ProcessGroup | None:
    """Return the group of a layer in a graph; None for None.

    Raises:
        RuntimeError: As :func:`syncbn.collectives.group_named`; the error names the layer.
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

    A rank that fails a check of ``arguments``, if they are given, or runs out of memory withdraws.
    ``mask`` is that of :func:`syncbn.masks.as_places`.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`check`; another rank's message has
            another size; in DistributedDataParallel.join().
        RuntimeError: The ranks run different passes; another rank has withdrawn or left.
    """
    _look_back(group)
    try:
        if arguments is not None:
            checks.check_training(input, arguments, alone=group is None)
        dense = layout.as_dense(input)
        if group is None:
            return dense, ops.batch_norm_stats(dense, mask=mask), None
        record = history_of(group).record(layer, tracing.forward_direction())
        message = ops.batch_norm_stats(dense, record.tag, record.outlook, mask=mask)
    except Exception as error:
        raise withdrawals.from_pass(error, group, layer, input, arguments) from None
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
    through: Through | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Record | None]:
    """Return grad_output, dense; the results of batch_norm_backward_reduce; and the record.

    Where dz is stored, it takes the place of grad_output. A rank that runs out of memory withdraws.

    Raises:
        RuntimeError: As :func:`start_forward`.
    """
    _look_back(group)
    try:
        input = layout.as_dense(input)
        grad_output = layout.as_dense(grad_output, like=input)
        record = None
        if group is not None:
            record = history_of(group).record(layer, "backward")
        announcement = (None, 0.0) if record is None else (record.tag, record.outlook)
        operands = (grad_output, input, mean, invstd, weight_dtype, bias_dtype, *announcement)
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
        raise withdrawals.from_pass(error, group, layer, input, None) from None
    if group is not None and record is not None:
        _enter(sums, group, record)
    grad_weight, grad_bias = gradients
    return grad_output, sums, grad_weight, grad_bias, record


def sum_values(values: Tensor, group: ProcessGroup, layer: Identity) -> Tensor:
    """Sum a vector over the ranks for a backward pass that is itself to be differentiated.

    Raises:
        NotImplementedError, RuntimeError: As :func:`sum_over_ranks`.
    """
    _look_back(group)
    record = history_of(group).record(layer, "double backward")
    statistics = values.to(devices.of_statistics(values.device)).to(torch.float64)
    end = statistics.new_tensor([0.0, record.tag, record.outlook, record.outlook**2])
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
            rank has withdrawn.
    """
    _look_back(group)
    record = history_of(group).record(layer, STEP)
    flags = [0.0] * group.size()
    flags[group.rank()] = float(flag)
    end = [0.0, record.tag, record.outlook, record.outlook**2]
    place = devices.of_statistics(device)
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
        totals = _torch_private.wait(reduced)
    except RuntimeError as error:
        raise errors.of_collective(error, group, record) from error
    record.history.hear(record, totals)
    return totals


def _enter(message: Tensor, group: ProcessGroup, record: Record) -> None:
    """Go on if the other ranks are to send messages of the same size, as far as is known."""
    history = record.history
    try:
        other = history.enter(record, message.numel(), group, message.device)
    except (ops.PassesDifferError, ops.WithdrawnError) as error:
        raise errors.of_pass(error, record.layer, group, record) from None
    except (RuntimeError, ValueError) as error:
        raise errors.of_collective(error, group, record) from error
    if other is None:
        return
    different = errors.of_report(other, group, record)
    history.sizes_sent[-1] = other.size
    try:
        if other.size:
            words = reports.write_withdrawal(group, history, different)
            withdrawals.send(group, other.size, message.device)
            if history.is_late(message.device):
                withdrawals.settle(group, message.device, words)
        raise different
    finally:
        del different  # a frame that holds an error of its own keeps its callers alive, and a group


def _check_join(group: ProcessGroup, layer: Identity) -> None:
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
        raise errors.with_layer_and_rank(NotImplementedError(words), layer, group)


# Verdicts: whether all ranks have made the same pass and none has withdrawn.


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
        with _torch_private.without_dispatch_modes():
            agreement.check_sound(totals, record.history.sum_of(record.tag, group))
    except (ops.PassesDifferError, ops.WithdrawnError) as error:
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
            withdrawals.settle(group, device)  # with those that have heard of it, or are to
        raise
    return totals


def judge_for(
    totals: Tensor, group: ProcessGroup | None, record: Record | None
) -> tuple[float | None, Tensor | None]:
    """Return ``tag_sum`` and ``verdict`` of the operators that take sums over all ranks."""
    if group is None or record is None:
        return None, None
    if record.direction == "recomputation" and _torch_private.num_dispatch_modes() > 0:
        if not _has_values(totals):
            return None, None
        record = _pass_of(totals, group, record)
    history = record.history
    tag_sum = history.sum_of(record.tag, group)
    if not totals.is_cuda:
        return tag_sum, None
    history.num_judged = round(tag_sum / record.tag)
    return tag_sum, history.verdict(totals.device).note


def _has_values(totals: Tensor) -> bool:
    """Whether the sums can be looked at: not on meta, nor on CUDA, which is not waited for."""
    return type(totals) is Tensor and not (totals.is_cuda or totals.is_meta)


def _pass_of(totals: Tensor, group: ProcessGroup, record: Record) -> Record:
    """Return the record of the pass that the sums are of.

    A recomputation may get those of the forward pass, which a mode or a compiler has kept.
    """
    if record.direction == "recomputation":
        first = record.history.record(record.layer, "forward")
        with _torch_private.without_dispatch_modes():
            if totals[-3] == record.history.sum_of(first.tag, group):
                return first
    return record


def judge_late(totals: Tensor, tag_sum: float | None, verdict: Tensor | None) -> Tensor:
    """Return all but the announcement of sums on CUDA, or NaN if they are not sound.

    The operator that finds out notes its verdict, which the next pass of the group reads.
    """
    no_input = totals.new_empty((0, agreement.channels_of(totals.size(0))))
    *_, count = ops.batch_norm_apply(
        no_input, totals, None, None, None, None, None, 0.0, 0.0, tag_sum, verdict
    )
    return torch.where(count.isnan(), torch.nan, totals[:-3])


def _look_back(group: ProcessGroup | None) -> None:
    """Raise RuntimeError if an earlier pass of the group on CUDA was not sound.

    Where the host does not wait for the device, it reads here what the operators have found since.
    This rank makes no message of this pass: no other waits for it, but over NCCL those whose hosts
    have gone further, which get withdrawals.
    """
    if group is None:
        return
    history = history_of(group)
    if not history.is_apart and not history.verdicts:
        return
    device = collectives.likely_device(group)
    if history.is_apart:
        hindrance = withdrawals.settle(group, device, patience=None).hindrance
        if hindrance:
            words = (
                "an earlier pass failed, and since then the ranks may have made different numbers "
                f"of passes: {hindrance}; call destroy_process_group(), then init_process_group()"
            )
            raise errors.with_layer_and_rank(RuntimeError(words), ANONYMOUS, group)
    found = history.noted()
    if found == 0:
        return
    tag = round(abs(found) / history.num_judged)
    cause, hindrance = withdrawals.hear(group, device)
    history.records.clear()  # they hold what has followed in that pass
    history.forget()
    what = (
        "another rank of the process group withdrew from it because of an error"
        if found < 0
        else "another rank made another pass in its place"
    )
    words = (
        f"{agreement.describe(tag)} gave NaN: {what}{cause and f'; {cause}'}; said in a later pass "
        "because the host does not wait for CUDA: it may be hundreds of launches ahead of the "
        "device, and what it has launched since then gave NaN or sums that belong to no pass"
    )
    if hindrance:
        words += f"; the ranks are not in step yet: {hindrance}"
    raise errors.with_layer_and_rank(RuntimeError(words), ANONYMOUS, group)


def check(
    input: Tensor, arguments: Arguments, group: ProcessGroup | None, layer: Identity
) -> Tensor | None:
    """Make the checks of a training pass; a rank that fails one withdraws.

    Returns:
        The mask, if there is one, as operators take it.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`syncbn.checks.check_training`.
    """
    try:
        checks.check_training(input, arguments, alone=group is None)
        return None if arguments.mask is None else masks.as_places(arguments.mask, input)
    except Exception as error:
        raise withdrawals.from_pass(error, group, layer, input, arguments) from None
