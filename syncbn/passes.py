"""The forward and the backward pass of a layer in training: operators and collectives joined.

Two ways lead here: :mod:`syncbn.functional` from a program and :mod:`syncbn.exported` from a graph
that a tracer recorded. What torch.compile traces is in :mod:`syncbn.compiled`.
"""

import torch
from torch import Tensor

from syncbn import exchange, layout, ops, reference
from syncbn.arguments import Arguments
from syncbn.collectives import ProcessGroup

__all__ = ["backward", "forward"]


def forward(
    input: Tensor, arguments: Arguments, group: ProcessGroup | None, layer: exchange.Layer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return totals, output, mean, invstd and count of a dense input.

    The first is the message of :func:`syncbn.ops.batch_norm_stats`, summed over the group; the
    others are what :func:`syncbn.ops.batch_norm_apply` makes of it.
    """
    with exchange.guard(group, layer, input):
        totals = ops.batch_norm_stats(input)
    if group is not None:
        totals = exchange.sum_over_ranks(totals, group, layer, "forward")
    try:
        return totals, *ops.batch_norm_apply(input, totals, *arguments.for_operators())
    except RuntimeError as error:
        raise exchange.with_place(error, layer, group) from None


def backward(
    grad_output: Tensor,
    saved: tuple[Tensor, ...],
    bias_dtype: torch.dtype | None,
    eps: float,
    group: ProcessGroup | None,
    layer: exchange.Layer,
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
            grad_output, input, weight, eps, group
        )
        grad_weight = layout.cast(grad_weight, weight_dtype)
        grad_bias = layout.cast(grad_bias, bias_dtype or torch.float64)
    else:
        grad_output = layout.as_dense(grad_output, like=input)
        sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
            grad_output, input, mean, invstd, weight_dtype, bias_dtype or torch.float64
        )
        if group is not None:
            sums = exchange.sum_over_ranks(sums, group, layer, "backward")
        if needs_grad_input:
            grad_input = ops.batch_norm_backward_apply(
                grad_output, input, mean, invstd, weight, sums, count
            )
    return (
        grad_input,
        None if weight is None else grad_weight,
        None if bias_dtype is None else grad_bias,
    )
