"""The forward and the backward pass of a layer in training: operators and collectives joined.

Three ways lead here: :mod:`syncbn.functional` from a program, :mod:`syncbn.compiled` from a graph
of torch.compile, :mod:`syncbn.exported` from a graph that another tracer recorded.
"""

import torch
from torch import Tensor

from syncbn import exchange, layout, ops, reference
from syncbn.collectives import ProcessGroup

__all__ = ["backward", "forward", "sum_gradients", "sum_statistics"]

Running = tuple[Tensor | None, Tensor | None, Tensor | None, float | None]


def sum_statistics(input: Tensor, group: ProcessGroup | None, layer: exchange.Layer) -> Tensor:
    """Return the message of :func:`syncbn.ops.batch_norm_stats`, summed over the group."""
    with exchange.guard(group, layer, input):
        message = ops.batch_norm_stats(input)
    if group is None:
        return message
    return exchange.sum_over_ranks(message, group, layer, "forward")


def sum_gradients(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    group: ProcessGroup | None,
    layer: exchange.Layer,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`syncbn.ops.batch_norm_backward_reduce`, the first result summed over the group."""
    sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
        grad_output, input, mean, invstd, weight_dtype, bias_dtype
    )
    if group is not None:
        sums = exchange.sum_over_ranks(sums, group, layer, "backward")
    return sums, grad_weight, grad_bias


def forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    eps: float,
    group: ProcessGroup | None,
    layer: exchange.Layer,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return totals, output, mean, invstd and count, as :func:`syncbn.ops.batch_norm_apply` does.

    ``input`` is dense. ``running`` is what that operator wants of the running statistics.
    """
    totals = sum_statistics(input, group, layer)
    try:
        return totals, *ops.batch_norm_apply(input, totals, weight, bias, *running, eps)
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
        sums, grad_weight, grad_bias = sum_gradients(
            grad_output,
            input,
            mean,
            invstd,
            weight_dtype,
            bias_dtype or torch.float64,
            group,
            layer,
        )
        if needs_grad_input:
            grad_input = ops.batch_norm_backward_apply(
                grad_output, input, mean, invstd, weight, sums, count
            )
    return (
        grad_input,
        None if weight is None else grad_weight,
        None if bias_dtype is None else grad_bias,
    )
