"""sync_batch_norm(): the autograd Function that joins the operators and the collectives."""

from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

from syncbn import checks, collectives, compiled, ops, reference
from syncbn.collectives import ProcessGroup

__all__ = ["sync_batch_norm"]


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
    layer: str = "",
    num_features: int | None = None,
) -> Tensor:
    """Normalize without communication, by running statistics or, without them, by the batch's.

    The operator is torch's own, so that exporters and compilers see what they know.
    """
    if isinstance(input, torch.fx.Proxy):  # symbolic tracing has no values to check
        return F.batch_norm(
            input, running_mean, running_var, weight, bias, running_mean is None, momentum, eps
        )
    try:
        checks.check_evaluation(input, num_features, weight, bias, running_mean, running_var, eps)
    except (TypeError, ValueError) as error:
        raise _with_place(error, layer, None) from None
    vectors = (running_mean, running_var, weight, bias)
    dtypes = {vector.dtype for vector in vectors if vector is not None}
    # F.batch_norm takes no mixed vectors, and float32 ones at most with a 16-bit input.
    sixteen_bit = input.dtype in (torch.float16, torch.bfloat16)
    if not (dtypes <= {input.dtype} or (sixteen_bit and dtypes == {torch.float32})):
        dtype = torch.float32 if sixteen_bit else input.dtype
        running_mean, running_var, weight, bias = (
            None if vector is None else vector.to(dtype) for vector in vectors
        )
    batch_statistics = running_mean is None
    return F.batch_norm(
        input, running_mean, running_var, weight, bias, batch_statistics, momentum, eps
    )


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
    layer: str = "",
    num_features: int | None = None,
) -> Tensor:
    """Normalize by the group's batch statistics and update the running ones.

    Arguments as :func:`sync_batch_norm`; a ``momentum`` of None is the cumulative average and
    needs ``num_batches_tracked``, which grows by one. ``layer`` names the layer in errors.
    """
    group = None
    try:
        group = collectives.resolve_group(process_group)
        checks.check_no_transform()
        checks.check_training(
            input,
            num_features,
            weight,
            bias,
            running_mean,
            running_var,
            num_batches_tracked,
            momentum,
            eps,
            alone=group is None,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        if group is not None:
            _withdraw(group, input, (weight, bias, running_mean, running_var), num_features)
        raise _with_place(error, layer, group) from None
    momentum = None if momentum is None else float(momentum)
    output: Tensor
    if torch.compiler.is_compiling():
        output = compiled.CompiledSyncBatchNormFunction.apply(
            input,
            weight,
            bias,
            running_mean,
            running_var,
            num_batches_tracked,
            momentum,
            float(eps),
            group,
        )
        return output
    if compiled.is_recomputation():
        running_mean = running_var = num_batches_tracked = None
        momentum = 0.0
    if group is not None:
        try:
            collectives.check_join()
        except NotImplementedError as error:
            raise _with_place(error, layer, group) from None
        _check_same_size(group, input, layer)
    try:
        # Out here, where autograd sees it: higher derivatives go through what is saved.
        dense = ops.as_dense(input)
    except RuntimeError:  # out of memory: the other ranks must not wait for this one
        if group is not None:
            collectives.withdraw(group, 2 * input.size(1) + 1, input.device)
        raise
    running = (running_mean, running_var, num_batches_tracked, momentum)
    output = SyncBatchNormFunction.apply(dense, weight, bias, running, float(eps), group, layer)
    return output


torch.fx.wrap("train")  # symbolic tracing records the call


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
        running: tuple[Tensor | None, Tensor | None, Tensor | None, float | None],
        eps: float,
        group: ProcessGroup | None,
        layer: str,
    ) -> Tensor:
        """Return the normalized input, which is dense; arguments as :func:`train`.

        ``running`` is what the operator wants of the running statistics, in one argument because
        autograd inspects every tensor that is passed directly.
        """
        try:
            totals = ops.batch_norm_stats(input)
        except RuntimeError:  # as above
            if group is not None:
                collectives.withdraw(group, 2 * input.size(1) + 1, input.device)
            raise
        if group is not None:
            totals = _all_reduce(totals, group, layer, "forward")
        try:
            output, mean, invstd, count = ops.batch_norm_apply(
                input, totals, weight, bias, *running, eps
            )
        except RuntimeError as error:
            raise _with_place(error, layer, group) from None
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
        """Return the gradients of input, weight and bias.

        Joins its collective whether or not the input needs a gradient: that may differ between
        ranks, and a rank that stayed away would hang the others.
        """
        input, weight, mean, invstd, count = ctx.saved_tensors
        grad_input: Tensor | None = None
        # Inside a backward pass, gradients are recorded exactly under create_graph=True.
        if torch.is_grad_enabled():
            grad_input, grad_weight, grad_bias = reference.batch_norm_backward(
                grad_output, input, weight, ctx.eps, ctx.group
            )
        else:
            grad_output = ops.as_dense(grad_output, like=input)
            sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
                grad_output, input, mean, invstd, weight
            )
            if ctx.group is not None:
                sums = _all_reduce(sums, ctx.group, ctx.layer, "backward")
            if ctx.needs_input_grad[0]:
                grad_input = ops.batch_norm_backward_apply(
                    grad_output, input, mean, invstd, weight, sums, count
                )
        return (
            grad_input,
            None if weight is None else ops.cast(grad_weight, weight.dtype),
            None if ctx.bias_dtype is None else ops.cast(grad_bias, ctx.bias_dtype),
            *_NO_GRADIENTS,
        )


def _place(layer: str, group: ProcessGroup | None) -> str:
    """Return which layer and rank this is, in brackets to follow a message; empty if unknown."""
    rank = "" if group is None else f"rank {group.rank()} of {group.size()}"
    known = ", ".join(part for part in (f"layer {layer!r}" if layer else "", rank) if part)
    return f" [{known}]" if known else ""


def _with_place(error: Exception, layer: str, group: ProcessGroup | None) -> Exception:
    return type(error)(f"{error}{_place(layer, group)}")


def _all_reduce(message: Tensor, group: ProcessGroup, layer: str, direction: str) -> Tensor:
    try:
        return collectives.all_reduce_sum(message, group)
    except RuntimeError as error:
        if "Batching rule not implemented" in str(error):
            words = "gradients of several ranks cannot be batched; leave out is_grads_batched=True"
            raise _with_place(NotImplementedError(words), layer, group) from error
        raise _communication_error(error, group, layer, direction) from error


def _communication_error(
    error: RuntimeError, group: ProcessGroup, layer: str, direction: str
) -> RuntimeError:
    return RuntimeError(
        f"the {direction} all-reduce of a SyncBatchNorm layer failed: another rank has failed, "
        "left, did not come in time or runs another layer; look at the first error of the other "
        "ranks, and run with TORCH_DISTRIBUTED_DEBUG=DETAIL to compare what they do"
        f"{_place(layer, group)}: {error}"
    )


def _check_same_size(group: ProcessGroup, input: Tensor, layer: str) -> None:
    """Raise ValueError if another rank's message to this group has another size."""
    try:
        other = collectives.find_size_mismatch(group, 2 * input.size(1) + 1, input.device)
    except RuntimeError as error:
        raise _communication_error(error, group, layer, "forward") from error
    if other is not None:
        collectives.withdraw(group, other, input.device)
        raise ValueError(
            f"expected the same channels on all ranks, but this rank normalizes "
            f"{input.size(1)} while another normalizes {(other - 1) // 2}; the ranks run "
            f"different layers{_place(layer, group)}"
        )


def _withdraw(
    group: ProcessGroup,
    input: object,
    vectors: tuple[Tensor | None, ...],
    num_features: int | None,
) -> None:
    """Let the other ranks of a forward pass fail, as far as it is known what they wait for."""
    tensors = [tensor for tensor in (*vectors, input) if isinstance(tensor, Tensor)]
    if num_features is None:
        if tensors and tensors[0] is not input and tensors[0].dim() == 1:
            num_features = tensors[0].size(0)
        elif isinstance(input, Tensor) and input.dim() > 1 and not input.is_nested:
            num_features = input.size(1)
    if num_features is not None:
        device = tensors[0].device if tensors else collectives.likely_device(group)
        collectives.withdraw(group, 2 * num_features + 1, device)
