"""A training pass. Forward: statistics, their sum over the ranks, apply. Backward: the same.

``totals`` and ``sums`` are vectors of all ranks, ``step`` is the pass that makes them: see
:mod:`syncbn.distributed.sync`. Graphs of torch.compile are in :mod:`syncbn.graph.inductor`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn import _compat, ops
from syncbn.distributed import sync
from syncbn.distributed.collectives import GroupReference
from syncbn.distributed.sync import Pass
from syncbn.ops import checks, epilogue, masks, reference, tensors
from syncbn.ops.arguments import Arguments
from syncbn.ops.batch_norm import Fused
from syncbn.ops.epilogue import NUMBERS, EpilogueGradient

__all__ = ["Saved", "SyncBatchNormFunction", "backward", "normalize", "train"]


def train(
    input: Tensor,
    arguments: Arguments,
    step: Pass,
    observe: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Normalize by the statistics of the group, or of this process, and update the running ones.

    ``observe`` is called with the sums over all ranks, float64 on the CPU.
    """
    is_joined = step.group is None and observe is None  # one operator makes the whole pass
    totals: Tensor | None = None
    with step:
        checks.check_training(input, arguments, single_process=step.group is None)
        if arguments.mask is not None:
            arguments = arguments._replace(mask=masks.as_places(arguments.mask, input))
        # Not in the Function: autograd, which sees the dense input, can differentiate again.
        input = tensors.as_dense(input)
        if not is_joined:
            totals = ops.batch_norm_stats(input, *step.tail, mask=arguments.mask)
    if totals is not None:
        totals = step.all_reduce(totals)
        if observe is not None:
            observe(step.verify_on_host(totals))
    weight, bias, *_ = arguments
    residual = arguments.residual
    if residual is not None:
        residual = tensors.as_dense(residual, like=input)
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
        if activation is not None:
            constants = input.new_empty(2 * input.size(1), dtype=torch.float64)
        if residual is not arguments.residual:
            arguments = arguments._replace(residual=residual)
        output, mean, invstd, count = normalize(input, totals, arguments, step, constants)
        # Never the running statistics or, but for SiLU's higher derivatives, the bias: they may
        # change before backward (a network that runs twice, an optimizer step), and nothing here
        # needs their old values.
        saved = (input, weight, mean, invstd, count, arguments.mask)
        if activation is None:
            ctx.save_for_backward(*saved)
        elif activation == "silu":
            ctx.save_for_backward(*saved, constants, residual, None, bias)
        elif residual is None:
            ctx.save_for_backward(*saved, constants, None, None, None)
        else:
            ctx.save_for_backward(*saved, None, None, output, None)
        ctx.activation, ctx.negative_slope = activation, arguments.negative_slope
        ctx.eps, ctx.bias_dtype = float(arguments.eps), None if bias is None else bias.dtype
        ctx.layer = step.layer
        ctx.group = None if step.group is None else GroupReference(step.group)
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
        # Read once: a checkpoint recomputes them at each access.
        input, weight, mean, invstd, count, mask, *source = ctx.saved_tensors
        derivative = (
            EpilogueGradient(ctx.activation, ctx.negative_slope, *source) if source else None
        )
        saved = Saved(input, weight, mean, invstd, count, mask, ctx.eps, ctx.bias_dtype, derivative)
        step = Pass(sync.group_held(ctx.group, ctx.layer), ctx.layer, "backward", input)
        needs_grad_input, *_, needs_grad_residual = ctx.needs_input_grad[:4]
        with _compat.without_torch_function():  # of subclasses, as in forward
            *gradients, grad_residual = backward(grad_output, saved, step, needs_grad_input)
            if mask is not None and derivative is None and needs_grad_residual:
                grad_residual = masks.clear(grad_output, mask)
        return *gradients, grad_residual if needs_grad_residual else None, None, None, None


def normalize(
    input: Tensor,
    totals: Tensor | None,
    arguments: Arguments,
    step: Pass,
    constants: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, mean, invstd and count of a dense input: :func:`syncbn.ops.batch_norm_apply`.

    Totals of None are the statistics of the input, whose vectors are not checked yet. The residual
    of ``arguments`` is dense as the input is, the mask is one of
    :func:`syncbn.ops.masks.as_places`. A recomputation leaves the running statistics alone.

    Raises:
        TypeError, ValueError: As :func:`syncbn.ops.checks.check_training`; one value per channel in
            the whole batch, which is not noticed on CUDA.
        RuntimeError: Another rank has aborted or makes another pass.
    """
    if _compat.is_recomputation():
        arguments = arguments.without_running()
    operands, mask = arguments.for_operators(), arguments.mask
    following: tuple[Fused, ...] = ()
    if arguments.is_fused:
        slope = float(arguments.negative_slope)
        following = (arguments.residual, NUMBERS[arguments.activation], slope, constants)
    try:
        if totals is None:
            if mask is not None and mask.is_cpu and mask.sum() == 1:
                raise ValueError(ops.ONE_VALUE)
            results = ops.batch_norm_forward(input, *operands, *following, mask=mask)
        else:
            expectation = step.expectation(totals)
            results = ops.batch_norm_apply(
                input, totals, *operands, *expectation, *following, mask=mask
            )
    except (RuntimeError, ValueError) as error:
        # Under no other name: a frame that holds an error of its own keeps its callers alive, and
        # with them a checkpoint that failed, until a collection of garbage.
        raise step.error(
            error if step.group is not None else checks.explain(error, input, arguments)
        ) from None
    written = [tensor for tensor in arguments[2:5] if tensor is not None]
    if written:  # autograd tells the backward pass of an evaluation that they have changed
        torch.autograd.graph.increment_version(written)
    return results


class Saved(NamedTuple):
    """The values of a forward pass that its backward pass takes."""

    input: Tensor  # dense
    weight: Tensor | None
    mean: Tensor
    invstd: Tensor
    num_values: Tensor  # per channel, of all ranks
    mask: Tensor | None
    eps: float
    bias_dtype: torch.dtype | None
    derivative: EpilogueGradient | None = None

    @property
    def gradient_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of weight's and bias's gradients."""
        weight_dtype = torch.float64 if self.weight is None else self.weight.dtype
        return weight_dtype, self.bias_dtype or torch.float64


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def backward(grad_output: Tensor, saved: Saved, step: Pass, needs_grad_input: bool) -> Gradients:
    """Return the gradients of input, weight, bias and residual; None if they are not needed.

    The last is, without an activation, ``grad_output`` at masked places too. Makes its collective
    whether or not the input needs a gradient: that may differ between ranks, and the others would
    wait for a rank that stayed away.
    """
    # Inside a backward pass, gradients are recorded exactly under create_graph=True.
    if torch.is_grad_enabled():
        return _differentiable_backward(grad_output, saved, step)
    input, weight, mean, invstd, count, mask, _, bias_dtype, derivative = saved
    stores_dz = derivative is not None and derivative.is_stored(input)
    source = () if derivative is None else derivative.for_operators()
    grad_input: Tensor | None = None
    if step.group is None and needs_grad_input and not stores_dz:
        with step:
            input = tensors.as_dense(input)
            grad_output = tensors.as_dense(grad_output, like=input)
            grad_input, grad_weight, grad_bias = ops.batch_norm_backward(
                *(grad_output, input, mean, invstd, weight, count),
                *saved.gradient_dtypes,
                *source,
                mask=mask,
            )
    else:
        with step:
            input = tensors.as_dense(input)
            grad_output = tensors.as_dense(grad_output, like=input)
            operands = (grad_output, input, mean, invstd, *saved.gradient_dtypes, *step.tail)
            if derivative is None or not stores_dz:
                sums, *gradients = ops.batch_norm_backward_reduce(*operands, *source, mask=mask)
            else:
                sums, *gradients, grad_output = ops.batch_norm_backward_reduce_dz(
                    *operands,
                    *source,
                    derivative.residual,
                    derivative.output,
                    mask=mask,
                )
                source = ()  # dz is the product with the activation's derivative
        grad_weight, grad_bias = gradients
        sums = step.all_reduce(sums)
        if needs_grad_input:
            try:
                grad_input = ops.batch_norm_backward_apply(
                    *(grad_output, input, mean, invstd, weight, sums, count),
                    *step.expectation(sums),
                    *source,
                    mask=mask,
                )
            except RuntimeError as error:
                raise step.error(error) from None
        else:
            step.verify(sums)
    return (
        grad_input,
        None if weight is None else grad_weight,
        None if bias_dtype is None else grad_bias,
        grad_output,
    )


def _differentiable_backward(grad_output: Tensor, saved: Saved, step: Pass) -> Gradients:
    """Do as :func:`backward` in expressions that autograd records; three all-reduces or more."""
    input, weight, _, _, _, mask, eps, bias_dtype, derivative = saved
    total = sync.sum_of(step.group, step.layer)
    if mask is not None:
        grad_output = masks.clear(grad_output, mask)
    if derivative is not None:
        z = _activation_input(saved, derivative, total)
        grad_output = epilogue.activation_gradient(grad_output.double(), z, *derivative[:2])
    grad_input, grad_weight, grad_bias = reference.batch_norm_backward(
        grad_output, input, weight, eps, total, mask
    )
    return (
        grad_input,
        None if weight is None else tensors.cast(grad_weight, weight.dtype),
        None if bias_dtype is None else tensors.cast(grad_bias, bias_dtype),
        tensors.cast(grad_output, input.dtype),
    )


def _activation_input(
    saved: Saved, derivative: EpilogueGradient, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the input of the activation or, with its sign, the output.

    With a gradient only for SiLU: the derivatives of the others are constant wherever they exist.
    """
    if derivative.activation == "silu":
        input, weight, mask, eps = saved.input, saved.weight, saved.mask, saved.eps
        z = reference.batch_norm(input, weight, derivative.bias, eps, total, mask)
        if derivative.residual is None:
            return z
        residual = derivative.residual if mask is None else masks.clear(derivative.residual, mask)
        return z + residual.to(z.dtype)
    if derivative.constants is not None:
        return reference.normalize_again(saved.input.detach(), saved.mean, derivative.constants)
    assert derivative.output is not None
    return derivative.output
