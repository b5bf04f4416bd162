"""The passes of a layer in training, once the ranks have summed their statistics.

They serve :mod:`syncbn.functional`, for a program, and :mod:`syncbn.exported`, for a graph that a
tracer recorded. A graph of torch.compile is in :mod:`syncbn.compiled`.
"""

import torch
from torch import Tensor

from syncbn import errors, exchange, layout, ops, reference, tracing
from syncbn.agreement import Record
from syncbn.arguments import Arguments
from syncbn.collectives import ProcessGroup
from syncbn.identity import Identity

__all__ = ["backward", "normalize"]


def normalize(
    input: Tensor,
    totals: Tensor,
    arguments: Arguments,
    group: ProcessGroup | None,
    layer: Identity,
    record: Record | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, mean, invstd and count of a dense input: :func:`syncbn.ops.batch_norm_apply`.

    A recomputation leaves the running statistics alone.

    Raises:
        RuntimeError: Another rank has withdrawn or makes another pass; the error names the layer
            and the rank.
    """
    if tracing.is_recomputation():
        arguments = arguments.without_running()
    judge = exchange.judge_for(totals, group, record)
    try:
        return ops.batch_norm_apply(input, totals, *arguments.for_operators(), *judge)
    except RuntimeError as error:
        raise errors.of_pass(error, layer, group, record) from None


def backward(
    grad_output: Tensor,
    saved: tuple[Tensor, ...],
    bias_dtype: torch.dtype | None,
    eps: float,
    group: ProcessGroup | None,
    layer: Identity,
    needs_grad_input: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias; None for what is None or not needed.

    ``saved`` is what forward had or returned: input, weight, mean, invstd, count. Joins its
    collective whether or not the input needs a gradient: that may differ between ranks, and a rank
    that stayed away would hang the others.
    """
    input, weight, mean, invstd, count = saved
    weight_dtype = torch.float64 if weight is None else weight.dtype
    grad_input: Tensor | None = None
    # Inside a backward pass, gradients are recorded exactly under create_graph=True.
    if torch.is_grad_enabled():
        grad_input, grad_weight, grad_bias = reference.batch_norm_backward(
            grad_output, input, weight, eps, group, layer
        )
        grad_weight = layout.cast(grad_weight, weight_dtype)
        grad_bias = layout.cast(grad_bias, bias_dtype or torch.float64)
    else:
        grad_output, sums, grad_weight, grad_bias, record = exchange.start_backward(
            grad_output,
            input,
            mean,
            invstd,
            weight_dtype,
            bias_dtype or torch.float64,
            group,
            layer,
        )
        sums = exchange.sum_over_ranks(sums, group, record)
        if needs_grad_input:
            judge = exchange.judge_for(sums, group, record)
            try:
                grad_input = ops.batch_norm_backward_apply(
                    grad_output, input, mean, invstd, weight, sums, count, *judge
                )
            except RuntimeError as error:
                raise errors.of_pass(error, layer, group, record) from None
        else:
            exchange.judge(sums, group, record)
    return (
        grad_input,
        None if weight is None else grad_weight,
        None if bias_dtype is None else grad_bias,
    )
