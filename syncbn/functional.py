"""sync_batch_norm(), and the autograd Function of the two passes."""

from typing import Any

import torch
import torch.fx
from torch import Tensor

from syncbn import (
    checks,
    collectives,
    compiled,
    exchange,
    exported,
    local,
    passes,
    tracing,
)
from syncbn.collectives import ProcessGroup

__all__ = ["sync_batch_norm"]

is_tracing = torch.jit.is_tracing  # type: ignore[attr-defined]


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    r"""Apply batch normalization with the statistics of the whole batch of a process group.

    Arguments as :func:`torch.nn.functional.batch_norm`, and the group. With ``training`` the input
    is normalized by the mean and biased variance of the values of all ranks, one all-reduce
    forward and one backward; without, it is ``torch.nn.functional.batch_norm``. Where
    torch.distributed is not initialized the batch is that of this process.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + b

    Args:
        input: Shape (N, C, ...), 2 or more dimensions, any strides; float16, bfloat16, float32 or
            float64. N may be 0 and may differ between ranks; C may not.
        running_mean: Shape [C], in the input's dtype, float32 or float64; updated in place when
            training. Both running statistics or neither.
        running_var: As ``running_mean``; moves toward the unbiased variance of the group.
        weight: Shape [C], same dtypes, or None for 1.
        bias: Shape [C], same dtypes, or None for 0.
        training: Normalize by batch statistics and update the running ones.
        momentum: Weight of the batch in the running statistics, without a unit.
        eps: Added to the variance, in units of the input squared; not negative.
        process_group: The ranks that share a batch; None is all of them.

    Returns:
        Shape, dtype and memory format of ``input``. The gradients of weight and bias are sums
        over this rank's values, for DistributedDataParallel to average.

    Raises:
        TypeError: An argument of the wrong type, dtype or layout.
        ValueError: An argument of the wrong shape, device or value; one value per channel without
            other ranks; a rank outside of ``process_group``; ranks with different C.
        NotImplementedError: Training on a device without operators, in a torch.func transform, or
            under DistributedDataParallel.join().
        RuntimeError: Another rank failed, left or did not come.

    Example:
        >>> import torch
        >>> from syncbn import sync_batch_norm
        >>> x = torch.arange(6.0).view(3, 2)
        >>> sync_batch_norm(x, None, None, training=True)
        tensor([[-1.2247, -1.2247],
                [ 0.0000,  0.0000],
                [ 1.2247,  1.2247]])
    """
    collectives.check_process_group(process_group)
    if not training:
        if running_mean is None and running_var is None:
            raise ValueError("expected running_mean and running_var when training is False")
        return evaluate(input, running_mean, running_var, weight, bias, momentum, eps)
    return train(input, running_mean, running_var, None, weight, bias, momentum, eps, process_group)


def evaluate(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    *,
    layer: exchange.Layer = "",
    num_features: int | None = None,
) -> Tensor:
    """Normalize without communication, by running statistics or, without them, by the batch's.

    The operator is torch's own, so that exporters and compilers see what they know.
    """
    # Symbolic tracing has no values to check; torch.jit.trace would warn of each that is looked at.
    if isinstance(input, torch.fx.Proxy) or is_tracing():
        vectors = (running_mean, running_var, weight, bias)
        return local.batch_norm(input, vectors, running_mean is None, momentum, eps)
    try:
        checks.check_evaluation(input, num_features, weight, bias, running_mean, running_var, eps)
    except (TypeError, ValueError) as error:
        raise exchange.with_place(error, layer, None) from None
    return local.evaluate(input, running_mean, running_var, weight, bias, momentum, eps)


def train(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
    process_group: ProcessGroup | None,
    *,
    layer: exchange.Layer = "",
    num_features: int | None = None,
) -> Tensor:
    """Normalize by the group's batch statistics and update the running ones.

    Arguments as :func:`sync_batch_norm`; a ``momentum`` of None is the cumulative average and
    needs ``num_batches_tracked``, which grows by one. ``layer`` names the layer in errors.
    """
    try:
        group = collectives.resolve_group(process_group)
    except (TypeError, ValueError) as error:
        raise exchange.with_place(error, layer, None) from None
    vectors = (weight, bias, running_mean, running_var)
    numbers = (num_batches_tracked, momentum, eps)
    if tracing.is_recorded():
        return exported.train(input, num_features, *vectors, *numbers, group, layer)
    output: Tensor
    if torch.compiler.is_compiling():
        traced = compiled.train(input, num_features, *vectors, *numbers, group, layer)
        if traced is not None:
            return traced
        output = _train_uncompiled(
            input,
            running_mean,
            running_var,
            num_batches_tracked,
            weight,
            bias,
            momentum,
            eps,
            process_group,
            layer=layer,
            num_features=num_features,
        )
        return output
    # Out here, where autograd sees it: higher derivatives go through what is saved.
    dense = exchange.prepare(input, num_features, *vectors, *numbers, group, layer)
    if group is not None:
        exchange.meet(group, input, layer)
    running: passes.Running = (
        running_mean,
        running_var,
        num_batches_tracked,
        None if momentum is None else float(momentum),
    )
    if tracing.is_recomputation():
        running = (None, None, None, 0.0)
    output = SyncBatchNormFunction.apply(dense, weight, bias, running, float(eps), group, layer)
    return output


torch.fx.wrap("train")  # symbolic tracing records the call

_train_uncompiled = torch.compiler.disable(
    train, reason="a SyncBatchNorm layer has a number that fits into no graph"
)


# For running, eps, group and layer.
_NO_GRADIENTS = (None,) * 4


class SyncBatchNormFunction(torch.autograd.Function):
    """Batch normalization by the statistics of a group: one collective forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: passes.Running,
        eps: float,
        group: ProcessGroup | None,
        layer: exchange.Layer,
    ) -> Tensor:
        """Return the normalized input, which is dense; arguments as :func:`train`.

        ``running`` is what the operator wants of the running statistics, in one argument because
        autograd inspects every tensor that is passed directly.
        """
        _, output, mean, invstd, count = passes.forward(
            input, weight, bias, running, eps, group, layer
        )
        # Never the running statistics or the bias: they may change before backward (a network
        # that runs twice, an optimizer step), and nothing here needs their old values.
        ctx.save_for_backward(input, weight, mean, invstd, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps, ctx.group, ctx.layer = eps, group, layer
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
        """Return the gradients of input, weight and bias."""
        gradients = passes.backward(
            grad_output,
            ctx.saved_tensors,
            ctx.bias_dtype,
            ctx.eps,
            ctx.group,
            ctx.layer,
            ctx.needs_input_grad[0],
        )
        return *gradients, *_NO_GRADIENTS
