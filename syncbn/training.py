"""A training pass: statistics, all-reduce, apply. Its backward pass: reduce, all-reduce, apply.

A :class:`PassRecord` is one direction of one layer in its group; in one process nothing is sent.
``message`` is what a rank sends, ``totals`` its sum over all ranks. An exception before a
collective aborts the pass on all ranks, an exception after it is this rank's own. Graphs of
torch.compile are in :mod:`syncbn.graph.inductor`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import _compat, ops
from syncbn._compat import (
    active_ddp_model,
    are_transforms_active,
    increment_version,
    is_profiling,
    jit_tracing_state,
    num_dispatch_modes,
)
from syncbn.distributed import alignment, collectives, errors, failures, negotiation
from syncbn.distributed.collectives import SUM, TORCHS_ALL_REDUCE
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.passes import library
from syncbn.distributed.state import GroupState, PassRecord, channels_of, group_state, size_of
from syncbn.ops import checks, formulas, masks, reference, tensors
from syncbn.ops.arguments import Arguments
from syncbn.ops.epilogue import FROM_OUTPUT, NUMBERS, EpilogueGradient

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


# Compilers continue after a break of their graph, and must not trace this.
@_compat.uncompiled
def train(
    input: Tensor,
    arguments: Arguments,
    record: PassRecord,
    observe: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Normalize by the statistics of the group, or of this process, and update the running ones.

    ``observe`` is called with the sums over all ranks, float64 on the CPU.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`syncbn.sync_batch_norm`.
        RuntimeError: Another rank fails, has failed before, or makes another pass.
    """
    if library is not None and observe is None:
        made: Tensor | None = library.train(input, arguments, record)
        if made is not None:
            return made
    state, totals = record.state, None
    if state is not None and (
        state.is_misaligned or state.statuses.by_device or active_ddp_model() is not None
    ):
        failures.check_before(record)
    try:
        if not are_as_before(input, arguments, record):
            arguments = checks.checked(input, arguments)
            record.checked, record.num_dims = arguments[5:11], input.dim()
        # Not in the Function, so that autograd differentiates it for higher derivatives, too.
        if not input.is_contiguous():
            input = tensors.as_dense(input)
        residual = arguments.residual
        if residual is not None:
            residual = tensors.as_dense(residual, like=input)
        if state is not None or observe is not None:
            operators = ops.usual if arguments.mask is None else ops.around(arguments.mask)
            message = operators.batch_norm_stats(
                input, record.tail, *arguments[:6], arguments.residual
            )
    except Exception as error:
        raise failures.abort(error, record, input, arguments) from None
    if state is not None or observe is not None:
        totals = all_reduce(message, record)
        if observe is not None:
            observe(verify_on_host(totals, record))
    weight, bias = arguments[:2]
    output: Tensor = _apply(input, weight, bias, residual, totals, arguments, record)
    return output


def are_as_before(input: Tensor, arguments: Arguments, record: PassRecord) -> bool:
    """Whether input and arguments have passed :func:`syncbn.ops.checks.checked` before."""
    return (
        type(input) is Tensor
        and (input.is_cpu or input.is_cuda)
        and type(arguments.momentum) is type(arguments.eps) is type(arguments.negative_slope)
        and type(arguments.eps) is float
        and arguments[5:11] == record.checked
        and arguments.mask is None
        and input.dim() == record.num_dims
        and input.size(1) == arguments.num_features
        and not are_transforms_active()
        and jit_tracing_state() is None
    )


class SyncBatchNormFunction(torch.autograd.Function):
    """Batch normalization of a dense input by sums over a group, or by its own statistics.

    Weight, bias and residual are given beside ``arguments``, in which autograd does not look for
    them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        totals: Tensor | None,
        arguments: Arguments,
        record: PassRecord,
    ) -> Tensor:
        """Return the normalized input, with the residual added and the activation applied."""
        activation, mask, constants = arguments.activation, arguments.mask, None
        if activation is not None and num_dispatch_modes() == 0:
            constants = input.new_empty(2 * input.size(1), dtype=torch.float64)
        if residual is not arguments.residual:
            arguments = arguments._replace(residual=residual)
        output, mean, invstd, count = normalize(input, totals, arguments, record, constants)
        # Not saved, because they may change before backward (a network that runs twice, an
        # optimizer step): running statistics, and the bias but for higher derivatives of SiLU.
        source: tuple[Tensor | None, ...] = ()  # the tensors of EpilogueGradient, in its order
        if activation is not None:
            if constants is None:
                # Under a dispatch mode: selective checkpointing may keep the operator's results and
                # not run it again. Then it would not write the constants.
                center = mean.to(tensors.compute_dtype(input))
                scale, shift = formulas.normalize_constants(mean, center, invstd, weight, bias)
                constants = torch.cat([scale, shift])
            if activation not in FROM_OUTPUT:
                source = constants, residual, None, bias
            elif residual is None:
                source = constants, None, None, None
            else:
                source = None, None, output, None
            ctx.activation, ctx.negative_slope = activation, arguments.negative_slope
        ctx.save_for_backward(input, weight, mean, invstd, count, mask, *source)
        ctx.eps, ctx.bias_dtype = arguments.eps, None if bias is None else bias.dtype
        ctx.has_residual, ctx.record, state = residual is not None, record, record.state
        # This graph holds its group, unless torch.distributed holds it and may destroy it.
        ctx.group = None if state is None or state.is_registered else state.group
        return output

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        """Refuse forward-mode differentiation."""
        raise NotImplementedError(
            "SyncBatchNorm in training mode has no forward-mode derivative; torch.autograd.grad "
            "differentiates it to any order, and evaluation mode has one"
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight, bias and residual."""
        record = _backward_record(ctx.record)
        with _compat.without_torch_function():  # saved tensors may be of subclasses
            return *backward(ctx, grad_output, record), None, None, None


# As SyncBatchNormFunction.apply where no transform of torch.func is active, in less time.
_apply = _compat.apply_of(SyncBatchNormFunction)


def normalize(
    input: Tensor,
    totals: Tensor | None,
    arguments: Arguments,
    record: PassRecord,
    constants: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, mean, invstd and count of a dense input, and update the running statistics.

    With ``totals`` of None, one operator checks the vectors and computes the statistics of the
    input, too. The residual of ``arguments`` has the input's memory format, the mask is a result
    of :func:`syncbn.ops.masks.as_positions`. A recomputation does not update running statistics.

    Raises:
        TypeError, ValueError: As :func:`syncbn.ops.checks.check_training`; one value per channel in
            the whole batch, except on CUDA.
        RuntimeError: Another rank has aborted or makes another pass.
    """
    if record.direction == "recomputation":
        arguments = arguments.without_running()
    state, mask, counter = record.state, arguments.mask, arguments.num_batches_tracked
    following: tuple[Any, ...] = ()
    if arguments.activation is not None or arguments.residual is not None:
        number, slope = NUMBERS[arguments.activation], arguments.negative_slope
        following = (arguments.residual, number, slope, constants)
    is_usual = mask is None and (counter is None or counter.dtype is torch.int64)
    operators = ops.usual if is_usual and num_dispatch_modes() == 0 else ops.around(mask)
    try:
        if totals is None:
            results = operators.batch_norm_forward(input, *arguments[:7], *following)
        else:
            if state is None:
                ops.check_more_than_one_value(totals, input.size(1))
            expectation = (None, None) if state is None else state.expectation(record, totals)
            results = operators.batch_norm_apply(
                input, totals, *arguments[:7], *expectation, *following
            )
    except Exception as error:
        # Not bound to another name: a frame that holds its own error is a reference cycle, which
        # keeps the tensors of its callers until the garbage collector runs.
        raise failures.in_operator(error, record, input, arguments) from None
    written: Any = arguments[2:5]
    if counter is None or arguments.running_mean is None:
        written = [tensor for tensor in written if tensor is not None]
    if written:  # autograd refuses the backward pass of an evaluation before, which needs them
        increment_version(written)
    return results


def _backward_record(record: PassRecord) -> PassRecord:
    """Return the record of the backward pass that follows; ValueError for a destroyed group."""
    state = record.state
    if state is None:
        return record
    if state.get_group() is None:
        raise errors.with_layer_and_rank(state.destroyed(), record.layer, None)
    return state.record(record.layer, "backward")


def backward(ctx: Any, grad_output: Tensor, record: PassRecord) -> Gradients:
    """Return the gradients of input, weight, bias and residual; None if they are not needed.

    ``ctx`` is the context of :meth:`SyncBatchNormFunction.forward`. The collective is made even if
    the input needs no gradient: it may need one on other ranks, which would wait for this rank.
    """
    state = record.state
    try:
        # Read once: a checkpoint recomputes the tensors at each access.
        input, weight, mean, invstd, count, mask, *source = ctx.saved_tensors
    except Exception as error:  # they were changed in place, or a hook did not bring them back
        raise failures.abort_unread(error, record, grad_output) from error.__cause__
    derivative = EpilogueGradient(ctx.activation, ctx.negative_slope, *source) if source else None
    if state is not None and (state.is_misaligned or state.statuses.by_device):
        failures.check_before(record)
    # Inside a backward pass, gradients are recorded exactly under create_graph=True.
    if torch.is_grad_enabled():
        return _differentiable_backward(
            ctx, grad_output, record, (input, weight, mean, mask), derivative
        )
    needs_grad_input = ctx.needs_input_grad[0]
    stores_dz = derivative is not None and derivative.is_stored(input)
    is_joined = state is None and needs_grad_input and not stores_dz  # one operator does it all
    dtypes = (torch.float64 if weight is None else weight.dtype, ctx.bias_dtype or torch.float64)
    activation = () if derivative is None else derivative.for_operators()
    operators = ops.usual
    if mask is not None or torch.compiler.is_dynamo_compiling() or num_dispatch_modes() > 0:
        operators = ops.around(mask)
    grad_input: Tensor | None = None
    try:
        if grad_output.layout is not torch.strided:
            checks.check_dense("grad_output", grad_output)
        dz = grad_output
        if not (input.is_contiguous() and dz.is_contiguous()):
            input = tensors.as_dense(input)
            dz = tensors.as_dense(dz, like=input)
        if is_joined:
            grad_input, grad_weight, grad_bias = operators.batch_norm_backward(
                dz, input, mean, invstd, weight, count, *dtypes, *activation
            )
        elif derivative is None or not stores_dz:
            message, grad_weight, grad_bias = operators.batch_norm_backward_reduce(
                dz, input, mean, invstd, *dtypes, record.tail, *activation
            )
        else:
            of_dz = (*activation, derivative.residual, derivative.output)
            message, grad_weight, grad_bias, dz = operators.batch_norm_backward_reduce_dz(
                dz, input, mean, invstd, *dtypes, record.tail, *of_dz
            )
            activation = ()
    except Exception as error:
        raise failures.abort(error, record, input) from None
    if not is_joined:
        totals = all_reduce(message, record)
        if needs_grad_input:
            expectation = (None, None) if state is None else state.expectation(record, totals)
            try:
                grad_input = operators.batch_norm_backward_apply(
                    dz, input, mean, invstd, weight, totals, count, *expectation, *activation
                )
            except RuntimeError as error:
                raise failures.in_operator(error, record, input) from None
        else:
            verify(totals, record)
    grad_residual: Tensor | None = None
    if ctx.has_residual:
        # After an activation, dz was stored and is 0 at masked positions.
        is_masked = derivative is None and mask is not None
        grad_residual = masks.clear(dz, mask) if is_masked else dz
    return (
        grad_input,
        None if weight is None else grad_weight,
        None if ctx.bias_dtype is None else grad_bias,
        grad_residual,
    )


class _LibraryContext(NamedTuple):
    """The context of a node of csrc/pass, as that of :class:`SyncBatchNormFunction`."""

    saved_tensors: list[Tensor | None]
    record: PassRecord
    eps: float
    bias_dtype: torch.dtype | None
    needs_input_grad: tuple[bool]
    number: int  # of the activation
    negative_slope: float
    has_residual: bool

    @property
    def activation(self) -> str | None:
        """The name of the activation."""
        return list(NUMBERS)[self.number]


def backward_of_library(context: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Make the backward pass of a node of csrc/pass, if the node does not make it."""
    return SyncBatchNormFunction.backward(_LibraryContext(*context), grad_output)


def unread_by_library(error: Exception, record: PassRecord, grad_output: Tensor) -> Exception:
    """Return the error of a node of csrc/pass that could not read its saved tensors."""
    return failures.abort_unread(error, _backward_record(record), grad_output)


# The sums over the ranks.


def all_reduce(message: Tensor, record: PassRecord) -> Tensor:
    """Sum a message over the ranks; in one process, return it.

    If its size has not followed the last pass before, the ranks first agree on it. The sums may be
    inconsistent; the operators that take them verify them.

    Raises:
        NotImplementedError: In a batch of gradients (``is_grads_batched``).
        RuntimeError, ValueError: Another rank sends another size, or has aborted the pass; the
            collective failed.
    """
    state, size = record.state, message.numel()
    if state is None:
        return message
    last, next_size, group = state.last, record.next_size, state.get_group()
    assert group is not None
    is_new = size not in last.sizes
    if is_new and state.is_asynchronous(message.device):
        failures.wait_for_totals(state, record, message.device)
    state.num_passes += 1
    state.size = size
    state.sizes_sent.append(size)
    if is_new:
        negotiation.agree(state, record, message.device)
    state.num_in_row = state.num_in_row + 1 if record.is_forward is last.is_forward else 1
    state.last, state.next_size_sent, state.totals = record, next_size, None
    state.num_summed = group.size() if state.adds_up else 1
    try:
        if is_profiling() or num_dispatch_modes() > 0 or dist.all_reduce is not TORCHS_ALL_REDUCE:
            label = record.label if is_profiling() else ""
            totals = collectives.all_reduce_sum(message, group, label)
        else:
            totals, work = message, group.allreduce([message], SUM)
            if work is not None:  # a group written in Python may return None
                work.wait()
    except (RuntimeError, ValueError) as error:
        raise failures.in_collective(error, record, message)  # noqa: B904  # it has a cause
    # Kept for the sizes in their tail, which tell the next message's; memory of a CUDA graph must
    # not be kept.
    if type(totals) is Tensor and not (totals.is_cuda and _compat.is_in_cuda_graph(totals)):
        state.totals = totals
    return totals


def verify(totals: Tensor, record: PassRecord) -> Tensor:
    """Return the sums without their tail.

    On CUDA, where nothing waits for them, they are NaN if they are inconsistent.

    Raises:
        RuntimeError: The ranks make different passes, or another rank has aborted this one; not
            on CUDA.
        ValueError: One value per channel in the whole group; not on CUDA.
    """
    state, first, status = record.state, None, None
    if state is None:
        return totals
    if record.direction == "recomputation":
        # It may get the sums of the forward pass, which a dispatch mode or a compiler has kept.
        first = state.sum_of(state.record(record.layer, "forward").fingerprint)
    if type(totals) is Tensor and totals.is_cuda:
        _, status = state.expectation(record, totals)
    operators = ops.usual if num_dispatch_modes() == 0 else ops.around(None)
    try:
        return operators.verify_sums(totals, state.sum_of(record.fingerprint), first, status)
    except Exception as error:
        raise failures.in_operator(error, record, totals) from None


def verify_on_host(totals: Tensor, record: PassRecord) -> Tensor:
    """Return the sums on the CPU, after :func:`verify`; waits for the device."""
    state, device = record.state, totals.device
    if state is None or not state.is_asynchronous(device):
        return verify(totals.cpu(), record)
    failures.wait_for(state, record, device)
    totals = totals.cpu()
    try:
        return verify(totals, record)
    except RuntimeError:
        alignment.align(state, device)  # the other ranks hear of it in a later pass
        raise


def named_record(group_name: str | None, layer: Identity, direction: str) -> PassRecord:
    """Return the record of a pass in a graph, which holds the name of its group.

    Raises:
        RuntimeError: torch.distributed has no group of this name; the error names the layer.
    """
    known: PassRecord | None = layer.record
    state = None if known is None else known.state
    if group_name is None:
        if known is not None and state is None and known.direction == direction:
            return known
        record = PassRecord(None, layer, direction)
    else:
        if state is None or state.name != group_name or state.is_destroyed():
            try:
                state = group_state(collectives.group_named(group_name))
            except RuntimeError as error:
                raise errors.with_layer_and_rank(error, layer, None) from error.__cause__
        record = state.record(layer, direction)
    if layer.key and record.is_forward:
        layer.record = record
    return record


# Higher derivatives.


class _SumOverRanks(torch.autograd.Function):
    """The sum over the group's ranks. Its gradient is the same sum, so that any order exists."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, state: GroupState, layer: Identity, size: int) -> Tensor:
        """Sum a vector over the ranks, in a message of the size of this layer's messages."""
        ctx.state, ctx.layer, ctx.size = state, layer, size
        ctx.group = None if state.is_registered else state.group
        record = state.record(layer, "double backward")
        failures.check_before(record)
        try:
            assert record.tail is not None
            statistics = values.to(torch.float64)
            padding = statistics.new_zeros(size - record.tail.size(0) - values.size(0))
            message = torch.cat([statistics, padding, record.tail.to(statistics.device)])
        except Exception as error:
            raise failures.abort(error, record, values, channels=channels_of(size)) from None
        totals = verify(all_reduce(message, record), record)
        return totals[: values.size(0)].to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the gradients over the ranks."""
        if ctx.state.get_group() is None:
            raise errors.with_layer_and_rank(ctx.state.destroyed(), ctx.layer, None)
        return _SumOverRanks.apply(grad, ctx.state, ctx.layer, ctx.size), None, None, None


def _differentiable_backward(
    ctx: Any,
    grad_output: Tensor,
    record: PassRecord,
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    derivative: EpilogueGradient | None,
) -> Gradients:
    """Do as :func:`backward`, in expressions that autograd records.

    :mod:`syncbn.ops.reference` makes three sums over the ranks, or five where it recomputes the
    activation's input. An exception before one of them aborts it.
    """
    input, weight, mean, mask = saved
    recomputes = derivative is not None and derivative.activation not in FROM_OUTPUT
    num_left, is_summing = 5 if recomputes else 3, False

    def total(values: Tensor) -> Tensor:
        nonlocal num_left, is_summing
        if record.state is None:
            return values
        is_summing = True
        size = size_of(input.size(1))
        summed: Tensor = _SumOverRanks.apply(values, record.state, record.layer, size)
        is_summing, num_left = False, num_left - 1
        return summed

    try:
        checks.check_dense("grad_output", grad_output)
        dz = grad_output if mask is None else masks.clear(grad_output, mask)
        if derivative is not None:
            if recomputes:
                z = reference.batch_norm(input, weight, derivative.bias, ctx.eps, total, mask)
                if derivative.residual is not None:
                    z = z + masks.clear_given(derivative.residual, mask).to(z.dtype)
            elif derivative.constants is not None:
                # Without a gradient: the activation's derivative is constant where it exists.
                z = reference.normalize_again(input.detach(), mean, derivative.constants)
            else:
                assert derivative.output is not None
                z = derivative.output  # has the sign of z
            dz = formulas.activation_gradient(dz.double(), z, *derivative[:2])
        grad_input, grad_weight, grad_bias = reference.batch_norm_backward(
            dz, input, weight, ctx.eps, total, mask
        )
        return (
            grad_input,
            None if weight is None else tensors.cast(grad_weight, weight.dtype),
            None if ctx.bias_dtype is None else tensors.cast(grad_bias, ctx.bias_dtype),
            tensors.cast(dz, input.dtype) if ctx.has_residual else None,
        )
    except Exception as error:
        if is_summing or num_left == 0:
            raise
        raise failures.abort(error, record, input) from None
