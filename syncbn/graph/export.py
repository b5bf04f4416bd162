"""The layer in training inside a graph of torch.export or make_fx.

The user of such a graph may differentiate it, so every operator in it needs a formula.
"""

from typing import Any

import torch
from torch import Tensor

from syncbn import _autograd, _compat, ops
from syncbn.distributed import collectives, errors, sync
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import Identity, identity_named
from syncbn.distributed.sync import Pass
from syncbn.ops import aten, checks, epilogue, masks, tensors
from syncbn.ops.arguments import Arguments


def train(
    input: Tensor, arguments: Arguments, group: ProcessGroup | None, layer: Identity
) -> Tensor:
    """Do as :func:`syncbn.functional.train`, by torch's own operator or, if needed, by ours.

    Ours is needed in a group and with a mask.
    """
    with Pass(group, layer, "forward", input, arguments):
        checks.check_training(input, arguments)
        checks.check_objects(input, arguments)
        mask = None if arguments.mask is None else masks.as_positions(arguments.mask, input)
    if not torch.compiler.is_compiling() and _compat.is_recomputation():
        # The update of the forward pass has been recorded; the update of this pass is dropped.
        arguments = arguments._replace(
            running_mean=_copy(arguments.running_mean),
            running_var=_copy(arguments.running_var),
            num_batches_tracked=_copy(arguments.num_batches_tracked),
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
    weight, bias, *running, momentum, eps = arguments.for_operators()
    output: Tensor
    output, totals, *_ = torch.ops.syncbn.exported_batch_norm.default(
        input, weight, bias, eps, group_name, layer.name, mask
    )
    torch.ops.syncbn.compiled_update.default(
        totals.detach(), *running, momentum, eps, input.dtype, None
    )
    if mask is not None and arguments.residual is not None:
        arguments = arguments._replace(residual=masks.clear(arguments.residual, mask))
    output = epilogue.apply_epilogue(output, arguments)
    return output if mask is None else masks.clear(output, mask)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


_library = torch.library.Library("syncbn", "FRAGMENT")
_library.define(
    "exported_batch_norm(Tensor input, Tensor? weight, Tensor? bias, float eps, str? group_name, "
    "str layer_name='', Tensor? mask=None)"
    " -> (Tensor output, Tensor totals, Tensor mean, Tensor invstd, Tensor count)"
)


@torch.library.impl(_library, "exported_batch_norm", "CompositeExplicitAutograd")
def _(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group_name: str | None,
    layer_name: str = "",
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    layer = identity_named(layer_name)
    group = sync.group_named(group_name, layer)
    step = Pass(group, layer, _compat.forward_direction(), input)
    with step:
        dense = tensors.as_dense(input)
        arguments = Arguments(weight, bias, None, None, None, 0.0, eps, mask=mask)
        totals = ops.batch_norm_stats(dense, step.tail, *arguments.for_checks(), mask=mask)
    totals = step.all_reduce(totals)
    output, *statistics = _autograd.normalize(dense, totals, arguments, step)
    mean, invstd, count = statistics
    return output, totals[: 2 * input.size(1) + 1], mean, invstd, count


@torch.library.register_fake("syncbn::exported_batch_norm")
def _(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group_name: str | None,
    layer_name: str = "",
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    channels = input.size(1)
    output = torch.empty_like(tensors.as_dense(input))
    totals = input.new_empty(2 * channels + 1, dtype=torch.float64)
    mean, invstd = totals.new_empty(channels), totals.new_empty(channels)
    return output, totals, mean, invstd, totals.new_empty(1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, bias, ctx.eps, ctx.group_name, ctx.layer_name, mask = inputs
    _, _, *statistics = output
    ctx.save_for_backward(input, weight, *statistics, mask)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.has_residual = False


def _backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    layer = identity_named(ctx.layer_name)
    step = Pass(sync.group_named(ctx.group_name, layer), layer, "backward")
    return *_autograd.backward(ctx, grad_output, step)[:3], None, None, None, None


torch.library.register_autograd("syncbn::exported_batch_norm", _backward, setup_context=_save)
