"""A training pass. Forward: statistics, all-reduce, apply. Backward: reduce, all-reduce, apply.

``totals`` and ``sums`` are sums over all ranks; ``step`` is the pass that computes them, see
:mod:`syncbn.distributed.sync`. Graphs of torch.compile are in :mod:`syncbn.graph.inductor`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncbn import _compat, ops
from syncbn.distributed import sync
from syncbn.distributed.sync import Pass
from syncbn.ops import checks, formulas, masks, reference, tensors
from syncbn.ops.arguments import Arguments
from syncbn.ops.epilogue import FROM_OUTPUT, NUMBERS, EpilogueGradient


def train(
    input: Tensor,
    arguments: Arguments,
    step: Pass,
    observe: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Normalize by the statistics of the group, or of this process, and update the running ones.

    ``observe`` is called with the sums over all ranks, float64 on the CPU.
    """
    is_joined = step.group is None and observe is None  # one operator computes the whole pass
    totals: Tensor | None = None
    with step:
        checks.check_training(input, arguments)
        if arguments.mask is not None:
            arguments = arguments._replace(mask=masks.as_positions(arguments.mask, input))
        # Not in the Function: autograd, which sees the dense input, can differentiate again.
        input = tensors.as_dense(input)
        residual = arguments.residual
        if residual is not None:
            residual = tensors.as_dense(residual, like=input)
        if not is_joined:
            totals = ops.batch_norm_stats(
                input, step.tail, *arguments.for_checks(), mask=arguments.mask
            )
    if totals is not None:
        totals = step.all_reduce(totals)
        if observe is not None:
            observe(step.verify_on_host(totals))
    weight, bias = arguments[:2]
    output: Tensor = _compat.apply_function(
        SyncBatchNormFunction, input, weight, bias, residual, totals, arguments, step
    )
    return output


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
        step: Pass,
    ) -> Tensor:
        """Return the normalized input, with the residual added and the activation applied."""
        activation, constants = arguments.activation, None
        if activation is not None and _compat.num_dispatch_modes() == 0:
            constants = input.new_empty(2 * input.size(1), dtype=torch.float64)
        if residual is not arguments.residual:
            arguments = arguments._replace(residual=residual)
        output, mean, invstd, count = normalize(input, totals, arguments, step, constants)
        if activation is not None and constants is None:
            # Selective checkpointing may keep the operator's results and not run it again. Then
            # it would not write the constants.
            center = mean.to(tensors.compute_dtype(input))
            scale, shift = formulas.normalize_constants(mean, center, invstd, weight, bias)
            constants = torch.cat([scale, shift])
        # The running statistics are never saved, and the bias only for SiLU's higher derivatives:
        # they may change before backward (a network that runs twice, an optimizer step).
        saved = (input, weight, mean, invstd, count, arguments.mask)
        if activation is None:
            ctx.save_for_backward(*saved)
        elif activation not in FROM_OUTPUT:
            ctx.save_for_backward(*saved, constants, residual, None, bias)
        elif residual is None:
            ctx.save_for_backward(*saved, constants, None, None, None)
        else:
            ctx.save_for_backward(*saved, None, None, output, None)
        if activation is not None:
            ctx.activation, ctx.negative_slope = activation, arguments.negative_slope
        ctx.eps, ctx.bias_dtype = float(arguments.eps), None if bias is None else bias.dtype
        ctx.has_residual = residual is not None
        ctx.layer, ctx.group = step.layer, step.group_reference()
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
        group = None if ctx.group is None else sync.group_held(ctx.group, ctx.layer)
        step = Pass(group, ctx.layer, "backward")
        with _compat.without_torch_function():  # of subclasses, as in forward
            return *backward(ctx, grad_output, step), None, None, None


def normalize(
    input: Tensor,
    totals: Tensor | None,
    arguments: Arguments,
    step: Pass,
    constants: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, mean, invstd and count of a dense input: :func:`syncbn.ops.batch_norm_apply`.

    With ``totals`` of None, one operator checks the vectors and computes the statistics of the
    input, too. The residual of ``arguments`` has the input's memory format, the mask is a result
    of :func:`syncbn.ops.masks.as_positions`. A recomputation does not update running statistics.

    Raises:
        TypeError, ValueError: As :func:`syncbn.ops.checks.check_training`; one value per channel in
            the whole batch, except on CUDA.
        RuntimeError: Another rank has aborted or makes another pass.
    """
    if step.direction == "recomputation":
        arguments = arguments.without_running()
    operands, mask = arguments.for_operators(), arguments.mask
    following: tuple[Any, ...] = ()
    if arguments.activation is not None or arguments.residual is not None:
        slope = float(arguments.negative_slope)
        following = (arguments.residual, NUMBERS[arguments.activation], slope, constants)
    try:
        if totals is None:
            results = ops.batch_norm_forward(input, *operands, *following, mask=mask)
        else:
            if step.group is None:
                ops.check_more_than_one_value(totals, input.size(1))
            expectation = step.expectation(totals)
            results = ops.batch_norm_apply(
                input, totals, *operands, *expectation, *following, mask=mask
            )
    except Exception as error:
        # Not bound to another name: a frame that holds its own error is a reference cycle, which
        # keeps the tensors of its callers until the garbage collector runs.
        raise step.error(error) from None
    written: Any = arguments[2:5]
    if arguments.running_mean is None or arguments.num_batches_tracked is None:
        written = [tensor for tensor in written if tensor is not None]
    if written:  # autograd tells the backward pass of an evaluation that they have changed
        _compat.increment_version(written)
    return results


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def backward(ctx: Any, grad_output: Tensor, step: Pass) -> Gradients:
    """Return the gradients of input, weight, bias and residual; None if they are not needed.

    ``ctx`` is the context of :meth:`SyncBatchNormFunction.forward`. The collective is made even if
    the input needs no gradient: it may need one on other ranks, which would wait for this rank.
    """
    step.input = grad_output
    try:
        # Read once: a checkpoint recomputes the tensors at each access.
        input, weight, mean, invstd, count, mask, *source = ctx.saved_tensors
    except Exception as error:  # they were changed in place, or a hook did not bring them back
        raise step.abort_before(error) from error.__cause__
    derivative = EpilogueGradient(ctx.activation, ctx.negative_slope, *source) if source else None
    step.input = input
    if grad_output.layout is not torch.strided:
        with step:
            checks.check_dense("grad_output", grad_output)
    # Inside a backward pass, gradients are recorded exactly under create_graph=True.
    if torch.is_grad_enabled():
        recomputes = derivative is not None and derivative.activation not in FROM_OUTPUT
        with sync.SumsOverRanks(step, 5 if recomputes else 3) as total:
            return _differentiable_backward(
                ctx, grad_output, total, (input, weight, mean, mask), derivative
            )
    needs_grad_input = ctx.needs_input_grad[0]
    stores_dz = derivative is not None and derivative.is_stored(input)
    dtypes = (
        torch.float64 if weight is None else weight.dtype,
        torch.float64 if ctx.bias_dtype is None else ctx.bias_dtype,
    )
    activation = () if derivative is None else derivative.for_operators()
    grad_input: Tensor | None = None
    if step.group is None and needs_grad_input and not stores_dz:
        with step:
            input = tensors.as_dense(input)
            dz = tensors.as_dense(grad_output, like=input)
            grad_input, grad_weight, grad_bias = ops.batch_norm_backward(
                dz, input, mean, invstd, weight, count, *dtypes, *activation, mask=mask
            )
    else:
        with step:
            input = tensors.as_dense(input)
            dz = tensors.as_dense(grad_output, like=input)
            operands = (dz, input, mean, invstd, *dtypes, step.tail, *activation)
            if derivative is None or not stores_dz:
                sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(*operands, mask=mask)
            else:
                sums, grad_weight, grad_bias, dz = ops.batch_norm_backward_reduce_dz(
                    *operands, derivative.residual, derivative.output, mask=mask
                )
                activation = ()
        sums = step.all_reduce(sums)
        if needs_grad_input:
            operands = (dz, input, mean, invstd, weight, sums, count, *step.expectation(sums))
            try:
                grad_input = ops.batch_norm_backward_apply(*operands, *activation, mask=mask)
            except RuntimeError as error:
                raise step.error(error) from None
        else:
            step.verify(sums)
    grad_residual: Tensor | None = None
    if ctx.has_residual:
        is_masked = derivative is None and mask is not None  # otherwise dz is 0 at these positions
        grad_residual = masks.clear(dz, mask) if is_masked else dz
    return (
        grad_input,
        None if weight is None else grad_weight,
        None if ctx.bias_dtype is None else grad_bias,
        grad_residual,
    )


def _differentiable_backward(
    ctx: Any,
    grad_output: Tensor,
    total: Callable[[Tensor], Tensor],
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    derivative: EpilogueGradient | None,
) -> Gradients:
    """Do as :func:`backward`, in expressions that autograd records: three all-reduces or five."""
    input, weight, mean, mask = saved
    dz = grad_output if mask is None else masks.clear(grad_output, mask)
    if derivative is not None:
        if derivative.activation not in FROM_OUTPUT:
            z = reference.batch_norm(input, weight, derivative.bias, ctx.eps, total, mask)
            if derivative.residual is not None:
                z = z + masks.clear_given(derivative.residual, mask).to(z.dtype)
        elif derivative.constants is not None:
            # Without a gradient: the derivatives are constant wherever they exist.
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
