"""A training pass: statistics, all-reduce, apply. Its backward pass: reduce, all-reduce, apply.

A :class:`PassRecord` is one direction of one layer in its group; in one process nothing is sent.
:mod:`syncbn.distributed.sums` has the all-reduce. An exception before it aborts the pass on all
ranks, an exception after it is this rank's own. Graphs of torch.compile are in
:mod:`syncbn.graph.inductor`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn import _compat, higher_derivatives, ops
from syncbn._compat import (
    active_ddp_model,
    are_transforms_active,
    increment_version,
    jit_tracing_state,
    num_dispatch_modes,
)
from syncbn.distributed import errors, failures
from syncbn.distributed.passes import library
from syncbn.distributed.state import PassRecord
from syncbn.distributed.sums import all_reduce, verify, verify_on_host
from syncbn.higher_derivatives import Gradients
from syncbn.ops import checks, formulas, masks, tensors
from syncbn.ops.arguments import Arguments
from syncbn.ops.epilogue import FROM_OUTPUT, NUMBERS, EpilogueGradient


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
        return higher_derivatives.backward(
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
