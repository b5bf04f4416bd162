"""The backward pass under ``create_graph=True``, which autograd differentiates in turn."""

from typing import Any

import torch
from torch import Tensor

from syncbn.distributed import errors, failures
from syncbn.distributed.layer_id import Identity
from syncbn.distributed.state import GroupState, PassRecord, channels_of, size_of
from syncbn.distributed.sums import all_reduce, verify
from syncbn.ops import checks, formulas, masks, reference, tensors
from syncbn.ops.epilogue import FROM_OUTPUT, EpilogueGradient

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _SumOverRanks(torch.autograd.Function):
    """The sum over the group's ranks. Its gradient is the same sum, so that any order exists."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, state: GroupState, layer: Identity, size: int) -> Tensor:
        """Sum a vector over the ranks, in a message of the size of this layer's messages."""
        ctx.state, ctx.layer, ctx.size = state, layer, size
        ctx.group = None if state.is_registered else state.group
        record = state.record(layer, "double backward")
        failures.check_before(record)
        try:
            assert record.tail is not None
            statistics = values.to(torch.float64)
            padding = statistics.new_zeros(size - record.tail.size(0) - values.size(0))
            message = torch.cat([statistics, padding, record.tail.to(statistics.device)])
        except Exception as error:
            raise failures.abort(error, record, values, channels=channels_of(size)) from None
        totals = verify(all_reduce(message, record), record)
        return totals[: values.size(0)].to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the gradients over the ranks."""
        if ctx.state.get_group() is None:
            raise errors.with_layer_and_rank(ctx.state.destroyed(), ctx.layer, None)
        return _SumOverRanks.apply(grad, ctx.state, ctx.layer, ctx.size), None, None, None


def backward(
    ctx: Any,
    grad_output: Tensor,
    record: PassRecord,
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    derivative: EpilogueGradient | None,
) -> Gradients:
    """Do as :func:`backward`, in expressions that autograd records.

    :mod:`syncbn.ops.reference` makes three sums over the ranks, or five where it recomputes the
    activation's input. An exception before one of them aborts it.
    """
    input, weight, mean, mask = saved
    recomputes = derivative is not None and derivative.activation not in FROM_OUTPUT
    num_left, is_summing = 5 if recomputes else 3, False

    def total(values: Tensor) -> Tensor:
        nonlocal num_left, is_summing
        if record.state is None:
            return values
        is_summing = True
        size = size_of(input.size(1))
        summed: Tensor = _SumOverRanks.apply(values, record.state, record.layer, size)
        is_summing, num_left = False, num_left - 1
        return summed

    try:
        checks.check_dense("grad_output", grad_output)
        dz = grad_output if mask is None else masks.clear(grad_output, mask)
        if derivative is not None:
            if recomputes:
                z = reference.batch_norm(input, weight, derivative.bias, ctx.eps, total, mask)
                if derivative.residual is not None:
                    z = z + masks.clear_given(derivative.residual, mask).to(z.dtype)
            elif derivative.constants is not None:
                # Without a gradient: the activation's derivative is constant where it exists.
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
    except Exception as error:
        if is_summing or num_left == 0:
            raise
        raise failures.abort(error, record, input) from None
