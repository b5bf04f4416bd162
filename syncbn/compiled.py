"""The layer in training inside a compiled graph, where the compiler can fuse it.

Sums over the batch and the update of the running statistics stay operators. The element-wise halves
are plain tensor expressions, which Inductor fuses with the activation and the residual around them;
their formulas are those of csrc/common/channel_constants.h. The operators here are written in
Python for two reasons: they take inputs of any strides, so that the compiler may choose the layout,
and they can ask, when the graph runs, what a graph cannot know when it is traced.
"""

from typing import Any

import torch
from torch import Tensor

from syncbn import collectives, ops
from syncbn.collectives import ProcessGroup

__all__ = ["CompiledSyncBatchNormFunction", "is_recomputation"]


class CompiledSyncBatchNormFunction(torch.autograd.Function):
    """As :class:`syncbn.functional.SyncBatchNormFunction`, to be traced by torch.compile.

    Makes the same collectives. Errors do not name the layer, which would compile each layer anew.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float | None,
        eps: float,
        group: ProcessGroup | None,
    ) -> Tensor:
        """Return the normalized input; arguments as :func:`syncbn.functional.train`."""
        totals: Tensor = torch.ops.syncbn.compiled_stats.default(input, group is not None)
        if group is not None:
            totals = collectives.functional_all_reduce_sum(totals, group)
        mean, invstd, count = torch.ops.syncbn.compiled_update.default(
            totals, running_mean, running_var, num_batches_tracked, momentum, eps, input.dtype
        )
        dtype = _compute_dtype(input)
        rounded_mean = ops.cast(mean, dtype)
        scale = invstd if weight is None else invstd * weight
        shift = (rounded_mean - mean) * scale
        if bias is not None:
            shift = shift + bias
        center, scale, shift = _per_channel(dtype, input, mean, scale, shift)
        output = (ops.cast(input, dtype) - center) * scale + shift
        ctx.save_for_backward(input, weight, mean, invstd, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group = group
        return ops.cast(output, input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        input, weight, mean, invstd, count = ctx.saved_tensors
        sums, grad_weight, grad_bias = torch.ops.syncbn.compiled_backward_reduce.default(
            grad_output, input, mean, invstd, weight
        )
        if ctx.group is not None:
            sums = collectives.functional_all_reduce_sum(sums, ctx.group)
        grad_input: Tensor | None = None
        if ctx.needs_input_grad[0]:
            dtype = _compute_dtype(input)
            mean_dy, mean_dy_xhat = (sums / count.clamp(min=1)).chunk(2)
            scale = invstd if weight is None else invstd * weight
            slope = -scale * invstd * mean_dy_xhat
            shift = -scale * mean_dy - (mean - ops.cast(mean, dtype)) * slope
            center, slope, shift, scale = _per_channel(dtype, input, mean, slope, shift, scale)
            deviation = ops.cast(input, dtype) - center
            grad_input = ops.cast(grad_output, dtype) * scale + (deviation * slope + shift)
            grad_input = ops.cast(grad_input, input.dtype)
        return (
            grad_input,
            None if weight is None else grad_weight,
            None if ctx.bias_dtype is None else ops.cast(grad_bias, ctx.bias_dtype),
            *(None,) * 6,
        )


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _per_channel(dtype: torch.dtype, input: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Return values [C] in ``dtype`` to be combined with ``input``, computed once per channel."""
    constants = ops.cast(torch.stack(values), dtype)
    torch.ops.syncbn.compiled_materialize.default(constants)
    shape = (1, -1) + (1,) * (input.dim() - 2)
    return tuple(constant.view(shape) for constant in constants.unbind())


def is_recomputation() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing's second run.

    Its statistics have been counted by the first.
    """
    return torch._C._current_graph_task_id() != -1


_library = torch.library.Library("syncbn", "FRAGMENT")

_library.define(
    "compiled_stats(Tensor input, bool synchronized) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl(_library, "compiled_stats", "CompositeExplicitAutograd")
def _(input: Tensor, synchronized: bool) -> Tensor:
    if synchronized:
        collectives.check_join()
    return ops.batch_norm_stats(ops.as_dense(input))


@torch.library.register_fake("syncbn::compiled_stats")
def _(input: Tensor, synchronized: bool) -> Tensor:
    return ops.batch_norm_stats(input)


# batch_norm_apply without the normalization; nothing where the graph runs as a recomputation.
_library.define(
    "compiled_update(Tensor totals, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches_tracked, float? momentum, float eps, ScalarType input_dtype)"
    " -> (Tensor mean, Tensor invstd, Tensor count)"
)


@torch.library.impl(_library, "compiled_update", "CompositeExplicitAutograd")
def _(
    totals: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    input_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    if is_recomputation():
        running_mean = running_var = num_batches_tracked = None
        momentum = 0.0
    no_input = totals.new_empty((0, totals.numel() // 2), dtype=input_dtype)
    _, mean, invstd, count = ops.batch_norm_apply(
        no_input, totals, None, None, running_mean, running_var, num_batches_tracked, momentum, eps
    )
    return mean, invstd, count


@torch.library.register_fake("syncbn::compiled_update")
def _(
    totals: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    input_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = totals.size(0) // 2
    return totals.new_empty(channels), totals.new_empty(channels), totals.new_empty(1)


_library.define(
    "compiled_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
    "Tensor? weight) -> (Tensor sums, Tensor grad_weight, Tensor grad_bias)",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl(_library, "compiled_backward_reduce", "CompositeExplicitAutograd")
def _(
    grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    input = ops.as_dense(input)
    return ops.batch_norm_backward_reduce(
        ops.as_dense(grad_output, like=input), input, mean, invstd, weight
    )


@torch.library.register_fake("syncbn::compiled_backward_reduce")
def _(
    grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight)


# Does nothing. Inductor, told that it changes the values, computes them before it and not again for
# each element that they are combined with.
_library.define("compiled_materialize(Tensor(a!) values) -> ()")


@torch.library.impl(_library, "compiled_materialize", "CompositeExplicitAutograd")
def _(values: Tensor) -> None:
    return None


@torch.library.register_fake("syncbn::compiled_materialize")
def _(values: Tensor) -> None:
    return None
