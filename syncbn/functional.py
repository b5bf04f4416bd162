"""sync_batch_norm(), and the choice among evaluation, training, and training in a graph."""

from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import torch
import torch.fx
from torch import Tensor

from syncbn import _compat, ops, training
from syncbn._compat import PRE_DISPATCH, graph_task_id, is_dispatch_key_included, num_dispatch_modes
from syncbn.distributed import collectives, errors, failures
from syncbn.distributed.collectives import DeviceMesh, ProcessGroup
from syncbn.distributed.layer_id import ANONYMOUS, Identity, Layer, identity_of
from syncbn.distributed.state import PassRecord, record_of
from syncbn.graph import export, inductor
from syncbn.ops import aten, checks, epilogue, masks, reference, tensors
from syncbn.ops.arguments import Arguments

has_torch_function = torch.overrides.has_torch_function


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: ProcessGroup | DeviceMesh | None = None,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
    mask: Tensor | None = None,
) -> Tensor:
    """Apply batch normalization with the statistics of the whole batch of a process group.

    Arguments as :func:`torch.nn.functional.batch_norm`, and the group. With ``training`` the input
    is normalized by the mean and biased variance of the values of all ranks, one all-reduce
    forward and one backward; without, it is ``torch.nn.functional.batch_norm``. Where
    torch.distributed is not initialized the batch is that of this process.

        y = (x - mean) / sqrt(variance + eps) * weight + bias

    A residual and an activation, if given, follow in the same passes over memory:
    ``activation(y + residual)``. In evaluation and in graphs they are torch's own operators, which
    compilers fuse.

    Where a mask is false, values of input and residual, also NaN, change no statistics and no
    other output. There the output and the gradients of input and residual are 0.

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
        process_group: The ranks that share a batch, or a DeviceMesh of one dimension; None is all
            ranks.
        residual: Shape and dtype of ``input``, any strides.
        activation: None, "relu", "leaky_relu" or "silu".
        negative_slope: Of leaky ReLU, without a unit; not negative.
        mask: bool, shape (N, ...) or (N, 1, ...), the positions of ``input``, or with sizes of 1
            that are broadcast. Ranks may differ in whether they give one.

    Returns:
        Shape, dtype and memory format of ``input``. The gradients of weight and bias are sums
        over this rank's values, for DistributedDataParallel to average.

    Raises:
        TypeError: An argument of the wrong type, dtype or layout.
        ValueError: An argument of the wrong shape, device or value; one value per channel in the
            whole batch, on CUDA only in a single process without a mask; a rank outside of
            ``process_group``, or a group that was destroyed; ranks with different C.
        NotImplementedError: Training in a torch.func transform, or under
            DistributedDataParallel.join().
        RuntimeError: Another rank failed, left, did not come or runs another layer.

    Example:
        >>> import torch
        >>> from syncbn import sync_batch_norm
        >>> x = torch.arange(6.0).view(3, 2)
        >>> sync_batch_norm(x, None, None, training=True)
        tensor([[-1.2247, -1.2247],
                [ 0.0000,  0.0000],
                [ 1.2247,  1.2247]])
    """
    process_group = collectives.checked_group(process_group)
    vectors = (weight, bias, running_mean, running_var, None)
    arguments = Arguments(
        *vectors, momentum, eps, None, activation, negative_slope, None, residual, mask
    )
    if not training:
        if running_mean is None and running_var is None:
            raise ValueError("expected running_mean and running_var when training is False")
        return evaluate(input, arguments)
    return train(input, arguments, process_group)


def evaluate(input: Tensor, arguments: Arguments, layer: Layer = ANONYMOUS) -> Tensor:
    """Normalize without communication, by running statistics or, without them, by the batch's.

    The operator is torch's own, which exporters and compilers know. ``layer`` names the layer in
    errors.
    """
    arguments = arguments.plain()
    # Symbolic tracing has no values to check, and torch.jit.trace warns of each value that is read.
    if isinstance(input, torch.fx.Proxy) or torch.jit.is_tracing():  # type: ignore[attr-defined]
        mask, by_batch = arguments.mask, arguments.running_mean is None
        if mask is None:
            output = aten.batch_norm(input, arguments, training=by_batch)
            return epilogue.apply_epilogue(output, arguments)
        if by_batch:
            return evaluate_masked(input, arguments)
        if arguments.residual is not None:
            arguments = arguments._replace(residual=masks.clear_given(arguments.residual, mask))
        output = aten.batch_norm(masks.clear_given(input, mask), arguments, training=False)
        return masks.clear_given(epilogue.apply_epilogue(output, arguments), mask)
    try:
        checks.check_call(input, arguments)
        if arguments.residual is not None or arguments.mask is not None:
            checks.check_objects(input, arguments)
        is_traced = torch.compiler.is_compiling() or num_dispatch_modes() > 0
        if not is_traced and not _compat.are_transforms_active():
            mask = arguments.mask
            positions = None if mask is None else masks.as_positions(mask, input)
            ops.check_arguments(input, *arguments.for_checks(), mask=positions, training=False)
    except Exception as error:
        error = checks.explain(error, input, arguments)
        raise errors.with_layer_and_rank(error, identity_of(layer), None) from None
    if arguments.mask is not None:
        return evaluate_masked(input, arguments)
    return epilogue.apply_epilogue(aten.evaluate(input, arguments), arguments)


def evaluate_masked(input: Tensor, arguments: Arguments) -> Tensor:
    """Do as :func:`evaluate`, with a mask among the arguments, which have been checked."""
    if arguments.mask is None:  # a placeholder of symbolic tracing
        return epilogue.apply_epilogue(aten.evaluate(input, arguments), arguments)
    mask, residual = masks.as_positions(arguments.mask, input), arguments.residual
    if residual is not None:
        arguments = arguments._replace(residual=masks.clear(residual, mask))
    if arguments.running_mean is None:  # torch's operator would count all positions
        weight, bias, *_ = arguments
        output = reference.batch_norm(input, weight, bias, arguments.eps, mask=mask)
        output = tensors.cast(output, input.dtype)
    else:
        output = aten.evaluate(masks.clear(input, mask), arguments)
    return masks.clear(epilogue.apply_epilogue(output, arguments), mask)


torch.fx.wrap("evaluate_masked")  # it looks at shapes, which symbolic tracing does not know


def train(
    input: Tensor,
    arguments: Arguments,
    process_group: ProcessGroup | None,
    layer: Layer = ANONYMOUS,
    observe: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Normalize by the group's batch statistics and update the running ones.

    ``layer`` names the layer in errors. ``observe``, where nothing traces, is called with the sums
    over all ranks, float64 on the CPU: for :mod:`syncbn.utils.precise_bn`.
    """
    # Checked here and not in graph/: after a graph break Dynamo still traces the functions that
    # this one calls, and they would find a compiler.
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced or num_dispatch_modes() > 0 or is_dispatch_key_included(PRE_DISPATCH):
        if is_traced and not _compat.is_exporting():
            group = _resolve_group(process_group, layer)
            return inductor.train(input, arguments.plain(), group, layer)
        if _compat.is_recorded():
            group = _resolve_group(process_group, layer)
            return export.train(input, arguments.plain(), group, identity_of(layer))
    # A tensor subclass decides, as for F.batch_norm. By default its __torch_function__ calls this
    # function again, with subclasses taken as plain tensors, and makes the output a subclass.
    if type(input) is not Tensor or has_torch_function(arguments):
        operands = (input, *arguments[:5], arguments.residual, arguments.mask)
        if has_torch_function(operands):
            return _call_override(operands, (input, arguments, process_group, layer, observe))
    identity = getattr(layer, "identity", None) or identity_of(layer)
    record = _record_of(process_group, identity)
    if record.state is None:
        collectives.warn_without_group()
    return training.train(input, arguments, record, observe)


def _call_override(operands: Any, call: tuple[Any, ...]) -> Tensor:
    """Let the ``__torch_function__`` of a subclass or a mode do as :func:`train`."""
    input, arguments, process_group, layer, _ = call
    record = _record_of(process_group, identity_of(layer))
    state = record.state
    num_passes = 0 if state is None else state.num_passes
    try:
        output: Tensor = torch.overrides.handle_torch_function(train, operands, *call)
        return output
    except Exception as error:
        # The call of train() aborts its pass itself, and raises errors of earlier passes.
        has_begun = any(frame.f_code is train.__code__ for frame, _ in walk_tb(error.__traceback__))
        if state is None or has_begun or state.num_passes != num_passes:
            raise
        raise failures.abort(error, record, input, arguments) from error.__cause__


torch.fx.wrap("train")  # symbolic tracing records the call


def _record_of(process_group: ProcessGroup | None, layer: Identity) -> PassRecord:
    """Return the record of the pass that a layer begins."""
    direction = "forward" if graph_task_id() == -1 else "recomputation"
    try:
        return record_of(process_group, layer, direction)
    except (TypeError, ValueError) as error:
        raise errors.with_layer_and_rank(error, layer, None) from None


def check_input(
    check: Callable[[Tensor], None],
    input: Tensor,
    arguments: Arguments,
    process_group: ProcessGroup | None,
    layer: Layer,
    *,
    training: bool,
) -> None:
    """Make a program's own check of the input of a pass, which in training fails on all ranks."""
    if isinstance(input, torch.fx.Proxy):  # symbolic tracing has no values to check
        return
    if torch.compiler.is_compiling():
        check(input)
        return
    record = PassRecord(None, identity_of(layer), "forward")
    if training:
        record = _record_of(process_group, identity_of(layer))
        failures.check_before(record)
    try:
        check(input)
    except Exception as error:
        raise failures.abort(error, record, input, arguments) from None


def _resolve_group(process_group: ProcessGroup | None, layer: Layer) -> ProcessGroup | None:
    try:
        return collectives.resolve_group(process_group)
    except (TypeError, ValueError) as error:
        raise errors.with_layer_and_rank(error, identity_of(layer), None) from None
