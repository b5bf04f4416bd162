"""A training pass among ranks: its message, the sum over the ranks, and whether it is consistent.

A pass uses protocol.py to agree with the other ranks, and abort.py if this rank fails::

    step = Pass(group, layer, "forward", input)
    with step:  # an exception in here aborts the pass on all ranks
        message = ops.batch_norm_stats(input, step.tail)
    totals = step.all_reduce(message)
    output, *_ = ops.batch_norm_apply(input, totals, ..., *step.expectation(totals))
"""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from syncbn import _compat, ops
from syncbn.distributed import abort, collectives, earlier_failures, errors, protocol
from syncbn.distributed.collectives import GroupReference, ProcessGroup
from syncbn.distributed.device_status import has_failed
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.protocol import STEP, PassRecord, group_state
from syncbn.distributed.store import text_of
from syncbn.ops import checks
from syncbn.ops.arguments import Arguments


class Pass:
    """One direction of one layer, on all ranks of a group or, without a group, in this process.

    An exception in ``with step:`` aborts the pass: this rank takes part in the collective of the
    other ranks, which then fail too. Code after the collective does not belong inside. A
    KeyboardInterrupt does not abort the pass, because it must not wait for the other ranks.
    """

    # The record of the pass in its group; None without a group.
    record: PassRecord | None = None
    # C, where neither the input nor the arguments tell it.
    channels: int | None = None

    def __init__(
        self,
        group: ProcessGroup | None,
        layer: Identity,
        direction: str,
        input: object = None,
        arguments: Arguments | None = None,
    ) -> None:
        self.group, self.layer, self.direction = group, layer, direction
        # If the rank fails before its message exists, they tell the message's size and device.
        self.input, self._arguments = input, arguments
        if group is not None:
            self.record = group_state(group).record(layer, direction)

    @property
    def tail(self) -> Tensor | None:
        """The end of the message, for the operator that makes it; None without a group."""
        return None if self.record is None else self.record.tail

    def __enter__(self) -> None:
        """Raise an error of an earlier pass, which does not abort this one.

        Raises:
            RuntimeError: An earlier pass of the group on CUDA was inconsistent.
            NotImplementedError: A forward pass under DistributedDataParallel.join().
        """
        if self.record is not None:
            state = self.record.state
            if state.is_misaligned or state.statuses:
                earlier_failures.check(state)
            if self.direction == "forward" and (join := _compat.join_config()) is not None:
                self._check_join(join)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort the pass after an exception."""
        if error is not None and isinstance(error, Exception):
            try:
                raise self.abort(error) from None
            finally:
                del error, traceback  # a frame that holds its own error is a reference cycle

    def abort(self, error: Exception) -> Exception:
        """Abort the pass because of an error; return it with the layer and the rank."""
        with _compat.without_overrides():  # which may have raised it
            if self._arguments is not None:
                error = checks.explain(error, self.input, self._arguments)
            if self.record is not None:
                abort.abort_pass(error, self.record.state, *self._size_and_device())
        return errors.with_layer_and_rank(error, self.layer, self.group)

    def abort_before(self, error: Exception) -> Exception:
        """Do as :meth:`abort`, because of an error in reading saved tensors."""
        if self.record is None or errors.is_of_recomputation(error):
            return error
        if self.record.state.last.direction == "recomputation":  # ended by the error, at any layer
            self.input = None
        return self.abort(error)

    def _size_and_device(self) -> tuple[int | None, torch.device | None]:
        """Return the size and the device of this rank's message, None if they are not known."""
        input, arguments = self.input, self._arguments
        vectors = [] if arguments is None else [*arguments.vectors]
        tensors = [tensor for tensor in (*vectors, input) if isinstance(tensor, Tensor)]
        channels = self.channels if arguments is None else arguments.num_features
        if channels is None:
            sizes = [v.size(0) for v in vectors if isinstance(v, Tensor) and v.dim() == 1]
            if isinstance(input, Tensor) and input.dim() > 1 and not input.is_nested:
                sizes.append(input.size(1))
            channels = sizes[0] if sizes else None
        size = protocol.size_of(channels) if isinstance(channels, int) else None
        return size, tensors[0].device if tensors else None

    def group_reference(self) -> GroupReference | None:
        """Return the reference by which a graph of autograd holds the group; None without one."""
        if self.group is None or self.record is None:
            return None
        return self.record.state.reference or GroupReference(self.group)

    def all_reduce(self, message: Tensor) -> Tensor:
        """Sum the message over the ranks, after they have agreed on its size.

        The sums may be inconsistent; the operators that take them verify them.

        Raises:
            NotImplementedError: In a batch of gradients.
            RuntimeError, ValueError: As :meth:`meet`; the collective failed.
        """
        group, record = self.group, self.record
        if group is None or record is None:
            return message
        self.meet(message)
        state = record.state
        try:
            label = record.label if state.has_labels else ""
            totals = collectives.all_reduce_sum(message, group, label)
        except (RuntimeError, ValueError) as error:
            if not errors.is_own(error):
                if collectives.is_of_backend(error) and state.is_asynchronous(message.device):
                    abort.leave(text_of(error))  # NCCL takes no further collective
                raise errors.of_collective(error, record) from error
            if not _compat.has_started(error):
                self._withdraw(error, message.numel(), message.device)
            raise errors.of_own(error, record) from error.__cause__
        state.keep_totals(totals, record)
        return totals

    def meet(self, message: Tensor) -> None:
        """Agree with the other ranks on the size of the message, before its collective.

        Raises:
            RuntimeError, ValueError: Another rank sends another size, or has aborted the pass.
        """
        record = self.record
        if record is None:
            return
        state, size, device = record.state, message.numel(), message.device
        if state.must_settle(size, device):
            self._wait_for(device)
        try:
            other = state.enter(record, size, device)
        except (ops.PassesDifferError, ops.AbortedError) as error:
            raise self._not_switched(error, device) from None
        except (RuntimeError, ValueError) as error:
            raise errors.of_collective(error, record) from error
        if other is None:
            return
        different = errors.of_report(other, record)
        state.sizes_sent[-1] = other.size
        try:
            if other.size:
                self._withdraw(different, other.size, device)
            raise different
        finally:
            del different  # a frame that holds its own error is a reference cycle

    def _withdraw(self, error: Exception, size: int, device: torch.device) -> None:
        """Abort the pass in the collective that the other ranks make of it."""
        assert self.record is not None
        state = self.record.state
        text = state.report_abort(error)
        device = collectives.likely_device(state.group, device)
        with _compat.without_dispatch_modes():  # which may have raised the error
            abort.take_part(state, size, device, text)
        if state.is_asynchronous(device):
            abort.align(state, device, text)

    def _wait_for(self, device: torch.device) -> None:
        """Wait until the device has the sums of all passes so far.

        Raises:
            RuntimeError: One of them has failed, or does not end in the time of a collective.
        """
        assert self.record is not None
        state = self.record.state
        try:
            earlier_failures.wait_for(device, state)
        except TimeoutError as error:
            raise errors.of_collective(error, self.record) from None

    def _not_switched(self, error: Exception, device: torch.device) -> Exception:
        """Return the error of a rank that wanted to send another size than the others expected."""
        record = self.record
        assert record is not None
        is_late = record.state.is_asynchronous(device)  # the others hear of it in a later pass
        error = errors.of_operator(error, record, others_know=not is_late)
        if is_late:
            abort.align(record.state, device, record.state.report_abort(error))
        return error

    def expectation(self, totals: Tensor) -> tuple[float | None, Tensor | None]:
        """Return ``tail_sum`` and ``status`` for the operator that takes the sums."""
        record = self.record
        if record is None:
            return None, None
        if self.direction == "recomputation" and _compat.num_dispatch_modes() > 0:
            if not _has_values(totals):
                return None, None
            record = self._record_of(totals)
        state = record.state
        expected = state.sum_of(record.fingerprint)
        if not totals.is_cuda:
            return expected, None
        state.num_verified = round(expected / record.fingerprint)
        return expected, state.status(totals.device).note

    def verify(self, totals: Tensor) -> Tensor:
        """Return the sums without their tail.

        On CUDA, where nothing waits for them, they are NaN if they are inconsistent.

        Raises:
            RuntimeError: The ranks make different passes, or another rank has aborted this one; not
                on CUDA.
            ValueError: One value per channel in the whole group; not on CUDA.
        """
        record, status, first = self.record, None, None
        if record is None:
            return totals
        if self.direction == "recomputation":
            # It may get the sums of the forward pass, which a mode or a compiler has kept.
            first = record.state.record(self.layer, "forward").fingerprint_sum
        if type(totals) is Tensor and totals.is_cuda:
            _, status = self.expectation(totals)
        try:
            return ops.verify_sums(totals, record.fingerprint_sum, first, status)
        except (RuntimeError, ValueError) as error:
            raise errors.of_operator(error, record) from None

    def verify_on_host(self, totals: Tensor) -> Tensor:
        """Return the sums on the CPU, after :meth:`verify`; waits for the device."""
        device, record = totals.device, self.record
        if record is not None and record.state.is_asynchronous(device):
            self._wait_for(device)
        totals = totals.cpu()
        try:
            return self.verify(totals)
        except RuntimeError:
            if record is not None and record.state.is_asynchronous(device):
                abort.align(record.state, device)  # with those that know it, or are to
            raise

    def error(self, error: Exception) -> Exception:
        """Return an operator's error with the layer, the rank and the passes of other ranks."""
        if self.record is None:
            return self.abort(error)
        device = self._size_and_device()[1]
        if device is not None and has_failed(device):
            abort.leave(text_of(error))
        return errors.of_operator(error, self.record)

    def _record_of(self, totals: Tensor) -> PassRecord:
        """Return the record of the pass that computed the sums.

        A recomputation may get the sums of the forward pass, which a mode or a compiler has kept.
        """
        record = self.record
        assert record is not None
        if self.direction == "recomputation":
            first = record.state.record(record.layer, "forward")
            with _compat.without_dispatch_modes():
                if totals[-3] == first.fingerprint_sum:
                    return first
        return record

    def _check_join(self, join: Any) -> None:
        """Raise NotImplementedError under DistributedDataParallel.join().

        There a rank without inputs takes part in the collectives of gradients only: the other ranks
        would wait for it in a layer, or add its gradients to their messages.
        """
        if join.enable and not join.throw_on_early_termination:
            text = (
                "SyncBatchNorm cannot train under DistributedDataParallel.join(), where a rank "
                "that has run out of inputs does not take part in the layer's all-reduce; give "
                "such a rank empty batches instead, or call join(throw_on_early_termination=True) "
                "to end all ranks together"
            )
            raise errors.with_layer_and_rank(NotImplementedError(text), self.layer, self.group)


def _has_values(totals: Tensor) -> bool:
    """Whether the host can read the sums: not on meta, nor on CUDA, where it would have to wait."""
    return type(totals) is Tensor and not (totals.is_cuda or totals.is_meta)


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


def group_held(reference: GroupReference, layer: Identity) -> ProcessGroup:
    """Return the group that a layer, or its pass, holds.

    Raises:
        ValueError: It was destroyed; the error names the layer.
    """
    try:
        return reference.get()
    except ValueError as error:
        raise errors.with_layer_and_rank(error, layer, None) from None


# Sums outside of a layer's forward and backward pass.


class _SumOverRanks(torch.autograd.Function):
    """The sum over the group's ranks, differentiable to any order: its gradient is itself."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, group: ProcessGroup, layer: Identity, channels: int
    ) -> Tensor:
        """Sum a vector over the ranks, in a message of the size of all messages of C channels."""
        ctx.group, ctx.layer, ctx.channels = GroupReference(group), layer, channels
        step = Pass(group, layer, "double backward", values)
        step.channels = channels
        with step:
            assert step.tail is not None
            statistics = values.to(torch.float64)
            padding = statistics.new_zeros(2 * channels + 1 - values.size(0))
            message = torch.cat([statistics, padding, step.tail.to(statistics.device)])
        totals = step.verify(step.all_reduce(message))
        return totals[: values.size(0)].to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the gradients over the ranks."""
        group = group_held(ctx.group, ctx.layer)
        return _SumOverRanks.apply(grad, group, ctx.layer, ctx.channels), None, None, None


class SumsOverRanks:
    """The sums over ranks of a backward pass that is to be differentiated itself.

    A call sums a vector of at most 2C values and can be differentiated. An exception between the
    calls, of which there are ``number``, aborts the next one.
    """

    def __init__(self, step: Pass, number: int) -> None:
        self._step, self._num_left, self._is_summing = step, number, False

    def __enter__(self) -> "SumsOverRanks":
        return self

    def __call__(self, values: Tensor) -> Tensor:
        """Return the sum of the vectors of all ranks."""
        step = self._step
        if step.group is None:
            return values
        self._is_summing = True
        assert isinstance(step.input, Tensor)
        channels = step.input.size(1)
        total: Tensor = _SumOverRanks.apply(values, step.group, step.layer, channels)
        self._is_summing, self._num_left = False, self._num_left - 1
        return total

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort the next sum after an exception."""
        is_between = self._num_left > 0 and not self._is_summing
        if isinstance(error, Exception) and self._step.group is not None and is_between:
            try:
                raise self._step.abort(error) from None
            finally:
                del error, traceback  # a frame that holds its own error is a reference cycle


def each_rank(flag: bool, group: ProcessGroup, layer: Identity, device: torch.device) -> list[bool]:
    """Return the flag of each rank of the group: a step between passes of layers.

    Raises:
        RuntimeError: As :meth:`Pass.all_reduce`; the ranks do not all make this step, or another
            rank has aborted it.
    """
    step = Pass(group, layer, STEP)
    with step:
        assert step.tail is not None
        flags = [0.0] * group.size()
        flags[group.rank()] = float(flag)
        values = [*flags, 0.0, *step.tail.tolist()]
        message = torch.tensor(values, dtype=torch.float64, device=device)
    totals = step.verify_on_host(step.all_reduce(message))
    return [value != 0 for value in totals[:-1].tolist()]
