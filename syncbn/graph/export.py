"""The layer in training inside a graph of torch.export or make_fx.

The user of such a graph may differentiate it, so every operator in it needs a formula.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import _compat, ops, training
from syncbn.distributed import collectives, errors, failures
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import Identity, identity_named
from syncbn.distributed.state import PassRecord, group_state
from syncbn.distributed.sums import all_reduce
from syncbn.graph.records import named_record
from syncbn.ops import aten, checks, epilogue, formulas, masks, tensors
from syncbn.ops.arguments import Arguments


def train(
    input: Tensor, arguments: Arguments, group: ProcessGroup | None, layer: Identity
) -> Tensor:
    """Do as :func:`syncbn.functional.train`, by torch's own operator or, if needed, by ours.

    Ours is needed in a group and with a mask.
    """
    # An export sends nothing, so that no rank waits for one that fails in it.
    record = None
    if group is not None and not torch.compiler.is_compiling():
        record = group_state(group).record(layer, "forward")
        failures.check_before(record)
    try:
        checks.check_training(input, arguments)
        checks.check_objects(input, arguments)
        mask = None if arguments.mask is None else masks.as_positions(arguments.mask, input)
    except Exception as error:
        record = record or PassRecord(None, layer, "forward")
        raise failures.abort(error, record, input, arguments) from None
    if not torch.compiler.is_compiling() and _compat.is_recomputation():
        # The update of the forward pass has been recorded; the update of this pass is dropped.
        mean, var, counter = (None if t is None else t.clone() for t in arguments[2:5])
        arguments = arguments._replace(
            running_mean=mean, running_var=var, num_batches_tracked=counter
        )
    if group is None and mask is None:
        return epilogue.apply_epilogue(aten.train(input, arguments), arguments)
    if group is not None and not collectives.name_of(group):
        words = (
            "expected a process group with a name, which the recorded graph would hold; make it "
            "with torch.distributed.new_group"
        )
        raise errors.with_layer_and_rank(ValueError(words), layer, group)
    group_name = None if group is None else group.group_name
    weight, bias, *running = arguments[:5]
    momentum = None if arguments.momentum is None else float(arguments.momentum)
    eps = float(arguments.eps)
    switch = _train_eval_switch() if _compat.is_exporting() else None
    normalized, totals, *_ = torch.ops.syncbn.exported_batch_norm.default(
        input, weight, bias, *running[:2], eps, group_name, layer.name, mask, switch
    )
    count = totals[-1:]
    mean, _, m2 = formulas.statistics(totals[:-1], count, eps)
    formulas.update_running((mean, m2, count), running, momentum)
    if mask is not None and arguments.residual is not None:
        arguments = arguments._replace(residual=masks.clear(arguments.residual, mask))
    output = epilogue.apply_epilogue(normalized, arguments)
    return output if mask is None else masks.clear(output, mask)


def _train_eval_switch() -> Tensor:
    """Return a tensor whose value is 1 where a tool has switched the graph to evaluation.

    Such a tool, as torchao's ``move_exported_model_to_eval``, rewrites the calls of torch's batch
    norm and dropout that it finds in the graph. It does not know our operators. In training this
    dropout is 0; after a way there and back, with the tool's own probability, 0 or 2.
    """
    return F.dropout(torch.ones(1, device="cpu"), p=1.0, training=True)


def _evaluates(switch: Tensor | None) -> bool:
    if switch is None or isinstance(switch, _compat.FakeTensor):
        return False
    return switch.item() == 1


_library = torch.library.Library("syncbn", "FRAGMENT")
_library.define(
    "exported_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
    "Tensor? running_var, float eps, str? group_name, str layer_name, Tensor? mask, "
    "Tensor? switch)"
    " -> (Tensor output, Tensor totals, Tensor mean, Tensor invstd, Tensor count)"
)


@torch.library.impl(_library, "exported_batch_norm", "CompositeExplicitAutograd")
def _(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    group_name: str | None,
    layer_name: str,
    mask: Tensor | None,
    switch: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dense = tensors.as_dense(input)
    arguments = Arguments(weight, bias, None, None, None, 0.0, eps, mask=mask)
    layer, evaluates = identity_named(layer_name), _evaluates(switch)
    name = None if evaluates else group_name
    record = named_record(name, layer, _compat.forward_direction())
    failures.check_before(record)
    try:
        stats = ops.around(mask).batch_norm_stats
        totals = stats(dense, record.tail, *arguments.for_checks())
    except Exception as error:
        raise failures.abort(error, record, input) from None
    totals = all_reduce(totals, record)
    if evaluates and running_mean is not None and running_var is not None:
        # A batch of two values whose mean and variance they are.
        mean, var = running_mean.double(), running_var.double()
        totals = 2 * torch.cat([mean, var + mean.square(), torch.ones_like(mean[:1])])
    output, mean, invstd, count = training.normalize(dense, totals, arguments, record)
    totals = totals[: 2 * input.size(1) + 1]
    # Sums of an empty batch update nothing.
    updates = not evaluates and record.direction == "forward"
    return output, totals if updates else torch.zeros_like(totals), mean, invstd, count


@torch.library.register_fake("syncbn::exported_batch_norm")
def _(input: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    channels = input.size(1)
    output = torch.empty_like(tensors.as_dense(input))
    totals = input.new_empty(2 * channels + 1, dtype=torch.float64)
    mean, invstd = totals.new_empty(channels), totals.new_empty(channels)
    return output, totals, mean, invstd, totals.new_empty(1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, bias, _, _, ctx.eps, ctx.group_name, ctx.layer_name, mask, switch = inputs
    _, totals, *statistics = output
    ctx.mark_non_differentiable(totals, *statistics)
    ctx.save_for_backward(input, weight, *statistics, mask)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.has_residual, ctx.evaluates = False, _evaluates(switch)


def _backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.evaluates:
        return *_backward_of_evaluation(ctx, grad_output), *(None,) * 7
    layer = identity_named(ctx.layer_name)
    record = named_record(ctx.group_name, layer, "backward")
    return *training.backward(ctx, grad_output, record)[:3], *(None,) * 7


def _backward_of_evaluation(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, whose statistics are constants."""
    input, weight, mean, invstd, _, mask = ctx.saved_tensors
    dims = [d for d in range(input.dim()) if d != 1]
    dy = grad_output.double() if mask is None else masks.clear(grad_output, mask).double()
    mean, invstd = tensors.per_channel(mean, input), tensors.per_channel(invstd, input)
    scale = invstd if weight is None else invstd * tensors.per_channel(weight, input)
    grad_weight = grad_bias = None
    if weight is not None:
        grad_weight = (dy * (input - mean) * invstd).sum(dims).to(weight.dtype)
    if ctx.bias_dtype is not None:
        grad_bias = dy.sum(dims).to(ctx.bias_dtype)
    return (dy * scale).to(input.dtype), grad_weight, grad_bias


torch.library.register_autograd("syncbn::exported_batch_norm", _backward, setup_context=_save)
