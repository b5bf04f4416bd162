"""The passes of a layer in training, once the ranks have summed their statistics.

They serve :mod:`syncbn.functional`, for a program, and :mod:`syncbn.graph.export`, for a graph that
a tracer recorded. A graph of torch.compile is in :mod:`syncbn.graph.inductor`.
"""

import torch
from torch import Tensor

from syncbn import _compat, ops
from syncbn.distributed import errors, sync
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.protocol import Record
from syncbn.ops import checks, epilogue, masks, reference, tensors
from syncbn.ops.arguments import Arguments
from syncbn.ops.batch_norm import Fused
from syncbn.ops.epilogue import NUMBERS, EpilogueGradient

__all__ = ["backward", "enter_alone", "normalize"]


def enter_alone(input: Tensor, arguments: Arguments, layer: Identity) -> Tensor:
    """Return the input, dense, of a pass without other ranks; the operator checks the rest.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`syncbn.ops.checks.check_training`.
    """
    try:
        checks.check_before_operator(input, arguments)
        return tensors.as_dense(input)
    except Exception as error:
        error = _in_words(error, input, arguments)
        raise errors.with_layer_and_rank(error, layer, None) from None


def normalize(
    input: Tensor,
    totals: Tensor | None,
    arguments: Arguments,
    group: ProcessGroup | None,
    layer: Identity,
    record: Record | None,
    constants: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, mean, invstd and count of a dense input: :func:`syncbn.ops.batch_norm_apply`.

    ``totals`` are the sums over the group, or None for the statistics of this process, whose
    vectors are not checked yet. The residual of ``arguments``, if there is one, is dense as the
    input is, and the mask is that of :func:`syncbn.ops.masks.as_places`. A recomputation leaves the
    running statistics alone.

    Raises:
        TypeError, ValueError: As :func:`syncbn.ops.checks.check_training`; one value per channel in
            the whole batch, which is not noticed on CUDA.
        RuntimeError: Another rank has aborted or makes another pass; the error names the layer
            and the rank.
    """
    if _compat.is_recomputation():
        arguments = arguments.without_running()
    following: tuple[Fused, ...] = ()
    if arguments.is_fused:
        slope = float(arguments.negative_slope)
        following = (arguments.residual, NUMBERS[arguments.activation], slope, constants)
    operands, mask = (*arguments.for_operators(),), arguments.mask
    try:
        if totals is None:
            if mask is not None and not (mask.is_cuda or mask.is_meta) and mask.sum() == 1:
                raise ValueError(ops.ONE_VALUE)
            results = ops.batch_norm_forward(input, *operands, *following, mask=mask)
        else:
            judge = sync.judge_for(totals, group, record)
            results = ops.batch_norm_apply(input, totals, *operands, *judge, *following, mask=mask)
    except (RuntimeError, ValueError) as error:
        # Under no other name: a frame that holds an error of its own keeps its callers alive, and
        # with them a checkpoint that failed, until a collection of garbage.
        raise errors.of_pass(
            error if totals is not None else _in_words(error, input, arguments),
            layer,
            group,
            record,
        ) from None
    written = [tensor for tensor in arguments[2:5] if tensor is not None]
    if written:  # autograd tells the backward pass of an evaluation that they have changed
        torch.autograd.graph.increment_version(written)
    return results


def _in_words(error: Exception, input: Tensor, arguments: Arguments) -> Exception:
    """Return what the checks say of what has been refused, or its own error."""
    try:
        checks.check_training(input, arguments, alone=True)
    except (TypeError, ValueError, NotImplementedError) as found:
        return found
    return error


def backward(
    grad_output: Tensor,
    saved: tuple[Tensor, ...],
    bias_dtype: torch.dtype | None,
    eps: float,
    group: ProcessGroup | None,
    layer: Identity,
    needs_grad_input: bool,
    through: EpilogueGradient | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, None for what is None or not needed.

    And, last, that of a residual, which without an activation is ``grad_output`` at masked places
    too. ``saved`` is what forward had or returned: input, weight, mean, invstd, count. Joins its
    collective whether or not the input needs a gradient: that may differ between ranks, and a rank
    that stayed away would hang the others.
    """
    input, weight, mean, invstd, count = saved
    weight_dtype = torch.float64 if weight is None else weight.dtype
    grad_input: Tensor | None = None
    # Inside a backward pass, gradients are recorded exactly under create_graph=True.
    if torch.is_grad_enabled():
        if mask is not None:
            grad_output = masks.clear(grad_output, mask)
        if through is not None:
            z = _argument(saved, through, eps, group, layer, mask)
            dy = grad_output.to(tensors.widest(input.device))
            grad_output = epilogue.activation_gradient(dy, z, *through[:2])
        grad_input, grad_weight, grad_bias = reference.batch_norm_backward(
            grad_output, input, weight, eps, sync.sum_of(group, layer), mask
        )
        grad_weight = grad_weight if weight is None else tensors.cast(grad_weight, weight.dtype)
        grad_bias = grad_bias if bias_dtype is None else tensors.cast(grad_bias, bias_dtype)
        grad_output = tensors.cast(grad_output, input.dtype)
    elif group is None and needs_grad_input and not (through and through.is_stored(input)):
        source = () if through is None else through.for_operators()
        dtypes = (weight_dtype, bias_dtype or torch.float64)
        try:
            input = tensors.as_dense(input)
            grad_output = tensors.as_dense(grad_output, like=input)
            grad_input, grad_weight, grad_bias = ops.batch_norm_backward(
                grad_output, input, mean, invstd, weight, count, *dtypes, *source, mask=mask
            )
        except RuntimeError as error:
            raise errors.with_layer_and_rank(error, layer, None) from None
    else:
        grad_output, sums, grad_weight, grad_bias, record = sync.start_backward(
            grad_output,
            input,
            mean,
            invstd,
            weight_dtype,
            bias_dtype or torch.float64,
            group,
            layer,
            through,
            mask,
        )
        sums = sync.sum_over_ranks(sums, group, record)
        if needs_grad_input:
            judge = sync.judge_for(sums, group, record)
            has_gone = through is None or through.is_stored(input)  # through it already
            source = () if through is None or has_gone else through.for_operators()
            try:
                grad_input = ops.batch_norm_backward_apply(
                    *(grad_output, input, mean, invstd, weight, sums, count),
                    *judge,
                    *source,
                    mask=mask,
                )
            except RuntimeError as error:
                raise errors.of_pass(error, layer, group, record) from None
        else:
            sync.judge(sums, group, record)
    return (
        grad_input,
        None if weight is None else grad_weight,
        None if bias_dtype is None else grad_bias,
        grad_output,
    )


def _argument(
    saved: tuple[Tensor, ...],
    through: EpilogueGradient,
    eps: float,
    group: ProcessGroup | None,
    layer: Identity,
    mask: Tensor | None,
) -> Tensor:
    """Return what the activation was applied to or, with its sign, the output.

    With a gradient only for SiLU: the derivatives of the others are constant wherever they exist.
    """
    input, weight, mean, _, _ = saved
    if through.activation == "silu":
        z = reference.batch_norm(input, weight, through.bias, eps, sync.sum_of(group, layer), mask)
        if through.residual is None:
            return z
        residual = through.residual if mask is None else masks.clear(through.residual, mask)
        return z + residual.to(z.dtype)
    if through.constants is not None:
        return reference.normalize_again(input.detach(), mean, through.constants)
    assert through.output is not None
    return through.output
