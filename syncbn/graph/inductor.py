"""The layer in training inside a compiled graph, where the compiler can fuse it.

The sums of a pass and their collective are one operator. All else are plain tensor expressions:
the update of the running statistics, and the element-wise halves, which Inductor fuses with the
residual and the activation behind them. The operators here are written in Python for two reasons:
they take inputs of any strides, so that the compiler may choose the layout, and when the graph runs
they know more than its tracer did, such as whether it runs as a recomputation.
"""

import hashlib
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from syncbn import _compat, ops, training
from syncbn.distributed import collectives, failures, passes
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import Identity, Layer, identity_from
from syncbn.distributed.state import PassRecord
from syncbn.distributed.sums import all_reduce, verify
from syncbn.graph.records import named_record
from syncbn.ops import checks, epilogue, formulas, masks, tensors
from syncbn.ops.arguments import Arguments

PACKAGE = Path(__file__).parents[1]
_NUM_ARGUMENTS = len(Arguments._fields)
_WIDE_DTYPES = (torch.float32, torch.float64)
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, *_WIDE_DTYPES)


def train(input: Tensor, arguments: Arguments, group: ProcessGroup | None, layer: Layer) -> Tensor:
    """As :func:`syncbn.functional.train`, to be traced by torch.compile.

    Raises:
        TypeError: An argument that fits into no graph, such as an input of None. The compiler runs
            the layer uncompiled or, with ``fullgraph=True``, quotes the error.
    """
    checks.check_no_transform()
    checks.check_local(input)
    checks.check_objects(input, arguments)
    # The value of a float may be variable; compiled_forward checks it.
    if type(arguments.eps) is not float:
        checks.check_eps(arguments.eps)
    if type(arguments.momentum) is not float and arguments.momentum is not None:
        checks.check_momentum(arguments.momentum)
    if arguments.mask is not None:
        arguments = arguments._replace(mask=masks.as_positions(arguments.mask, input))
    if group is None:
        collectives.warn_while_tracing()
    group_name = None if group is None else group.group_name
    identity = 0 if isinstance(layer, (Identity, str)) else layer.graph_input
    output: Tensor = _compiled_train(input, *arguments, group_name, identity)
    return output


def _fitting_tensors(input: Tensor, arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors that a graph can be traced with, by name.

    For the others compiled_forward raises the error of an eager layer when the graph runs.
    """
    vector = tuple(input.shape[1:2]) or (1,)
    shapes = {
        "weight": (vector, _FLOAT_DTYPES),
        "bias": (vector, _FLOAT_DTYPES),
        "residual": (input.shape, (input.dtype,)),
        "mask": (input.shape[:1] + input.shape[2:], (torch.bool,)),
    }
    fitting = {}
    for name, (shape, dtypes) in shapes.items():
        tensor = getattr(arguments, name)
        fits = tensor is not None and tensor.shape == shape and tensor.dtype in dtypes
        if fits and tensor.device == input.device:
            fitting[name] = tensor
    return fitting


class CompiledSyncBatchNormFunction(torch.autograd.Function):
    """As :class:`syncbn.training.SyncBatchNormFunction`, to be traced by AOTAutograd.

    Makes the same collectives. The layer's identity is an input of the graph: a graph that knew the
    name would not serve another layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        arguments: Arguments,
        group_name: str | None,
        identity: int,
    ) -> Tensor:
        """Return the normalized input.

        Weight, bias and mask are None, unlike in ``arguments``, if they do not fit into a graph.
        """
        updated = _updated(input, arguments)
        # A graph that needs running statistics for its sums could not compute those again after
        # their update.
        checked = arguments if updated is None else arguments.without_running()
        # A partition that computed the sums again would make another collective.
        with _compat.saved_in_graphs():
            totals = _in_order(
                torch.ops.syncbn.compiled_forward.default, group_name, input, *checked, identity
            )
        updates = updated is not None and updated != [None, None, None]
        if not updates and group_name is not None:
            totals = _compat.wait(totals)  # compilers keep this operator, and so the one before it
        counted = totals[-1:]
        count = counted.abs()
        mean, invstd, m2 = formulas.statistics(totals[:-1], count, arguments.eps)
        if updated is not None:
            formulas.update_running((mean, m2, counted), updated, arguments.momentum)
        rounded_mean = tensors.cast(mean, tensors.compute_dtype(input))
        scale, shift = formulas.normalize_constants(mean, rounded_mean, invstd, weight, bias)
        center, scale, shift = _per_channel(input, mean, scale, shift)
        output = torch.addcmul(shift, tensors.cast(input, center.dtype) - center, scale)
        if mask is not None:  # a masked NaN must not reach the derivative of the epilogue
            output = masks.clear(output, mask)
        ctx.save_for_backward(input, weight, mean, invstd, count, mask)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group_name, ctx.identity = group_name, identity
        return tensors.cast(output, input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        input, weight, mean, invstd, count, mask = ctx.saved_tensors
        sums, grad_weight, grad_bias = _in_order(
            torch.ops.syncbn.compiled_backward.default,
            ctx.group_name,
            grad_output,
            input,
            mean,
            invstd,
            torch.float64 if weight is None else weight.dtype,
            ctx.bias_dtype or torch.float64,
            mask,
            ctx.identity,
        )
        grad_input: Tensor | None = None
        if ctx.needs_input_grad[0]:
            rounded_mean = tensors.cast(mean, tensors.compute_dtype(input))
            sums = sums[: 2 * input.size(1)]
            slope, shift, scale = formulas.grad_input_constants(
                mean, rounded_mean, invstd, weight, sums, count
            )
            center, slope, shift, scale = _per_channel(input, mean, slope, shift, scale)
            grad_input = torch.addcmul(shift, tensors.cast(input, center.dtype) - center, slope)
            grad_input = torch.addcmul(grad_input, tensors.cast(grad_output, scale.dtype), scale)
            grad_input = tensors.cast(grad_input, input.dtype)
            if mask is not None:
                grad_input = masks.clear(grad_input, mask)
        return (
            grad_input,
            None if weight is None else grad_weight,
            None if ctx.bias_dtype is None else grad_bias,
            *(None,) * 4,
        )


# By tracer, a result of the last operator that it has traced.
_last_results: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def _in_order(operator: Any, group_name: str | None, *operands: Any) -> Any:
    """Trace an operator that makes a collective behind the one before it, which it depends on.

    A compiler then moves no collective past another, and merges no calls of equal arguments, such
    as a layer twice on one input: ranks that run uncompiled would wait for the second.
    """
    tracer = None if group_name is None else _compat.tracer_of_graph()
    if tracer is None:
        return operator(*operands, group_name, None)
    results = operator(*operands, group_name, _last_results.get(tracer))
    _last_results[tracer] = results if isinstance(results, Tensor) else results[-1]
    return results


def _updated(input: Tensor, arguments: Arguments) -> list[Tensor | None] | None:
    """Return the running statistics and the number of batches that a graph can update.

    None if one of them does not fit: then compiled_forward raises its error when the graph runs.
    """
    updated = list(arguments[2:5])
    mean, var, counter = updated
    fit = (mean is None) == (var is None) and all(
        v is None or v.device == input.device for v in updated
    )
    for v in (mean, var):
        if v is not None:
            fit &= v.shape == input.shape[1:2] and v.dtype in {input.dtype, *_WIDE_DTYPES}
            fit &= v.size(0) == 1 or v.stride(0) != 0
    if counter is not None:
        fit &= counter.numel() == 1 and counter.dtype != torch.bool and not counter.is_complex()
    elif arguments.momentum is None:
        fit &= mean is None
    return updated if fit else None


def _per_channel(input: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Return values [C], ready to be combined with ``input``, computed once per channel."""
    constants = tensors.cast(torch.stack(values), tensors.compute_dtype(input))
    # Inductor computes what as_strided views once, and not again for each element.
    (number, channels), ones = constants.shape, (1,) * (input.dim() - 2)
    sizes, strides = (number, 1, channels, *ones), (channels, channels, 1, *ones)
    return constants.as_strided(sizes, strides).unbind()


_library = torch.library.Library("syncbn", "FRAGMENT")

_ARGUMENTS = (
    "Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, "
    "Tensor? num_batches_tracked, float? momentum, float eps, SymInt? num_features, "
    "str? activation, float negative_slope, int[]? dims, Tensor? residual, Tensor? mask"
)


def _digest() -> str:
    """Return a digest of the Python code that is compiled for a layer.

    torch finds compiled code on disk by the names of a graph's operators: without the digest it
    would take the code of another version of this package.
    """
    paths = [
        path for name in ("_compat", "ops/*", "graph/*") for path in PACKAGE.glob(f"{name}.py")
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:8]


# Dynamo records a layer as this one operator: it took half of the time of a compilation to trace
# those in it, which AOTAutograd compiles.
_TRAIN = f"compiled_train.code_{_digest()}"
_library.define(f"{_TRAIN}(Tensor input, {_ARGUMENTS}, str? group_name, SymInt identity) -> Tensor")


@torch.library.impl(_library, _TRAIN, "CompositeImplicitAutograd")
def _(input: Tensor, *values: Any) -> Tensor:
    arguments = Arguments(*values[:_NUM_ARGUMENTS])
    fitting = _fitting_tensors(input, arguments)
    weight, bias, residual, mask = map(fitting.get, ("weight", "bias", "residual", "mask"))
    if residual is not None:
        arguments = arguments._replace(residual=None)
    output: Tensor = CompiledSyncBatchNormFunction.apply(
        tensors.as_dense(input), weight, bias, mask, arguments, *values[_NUM_ARGUMENTS:]
    )
    if residual is not None:
        output = output + (residual if mask is None else masks.clear(residual, mask))
    if arguments.activation in epilogue.NUMBERS:
        output = epilogue.activate(output, arguments.activation, arguments.negative_slope)
    return output  # 0 at masked positions: each activation of 0 is 0


_compiled_train = getattr(torch.ops.syncbn.compiled_train, _TRAIN.partition(".")[2])

# Takes the arguments of the layer, which it checks when the graph runs; it writes none. Returns the
# sums of x and of x² over the group, and the number of values per channel, which is negative in a
# recomputation: no running statistics are updated there.
_library.define(
    f"compiled_forward(Tensor input, {_ARGUMENTS}, SymInt identity, str? group_name, "
    "Tensor? previous) -> Tensor totals",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl(_library, "compiled_forward", "CompositeExplicitAutograd")
def _(input: Tensor, *values: Any) -> Tensor:
    record, arguments = _begin(*values)
    totals: Tensor | None = None
    if passes.library is not None:
        totals = passes.library.sum_statistics(input, arguments, record)
    if totals is None:
        totals = _sum_statistics(input, arguments, record)
    totals = verify(totals, record)
    if record.direction == "recomputation":
        totals[-1:].neg_()
    return totals


def _sum_statistics(input: Tensor, arguments: Arguments, record: PassRecord) -> Tensor:
    try:
        if not training.are_as_before(input, arguments, record):
            checks.check_training(input, arguments)
            record.checked, record.num_dims = arguments[5:11], input.dim()
        operators = ops.usual if arguments.mask is None else ops.around(arguments.mask)
        message = operators.batch_norm_stats(
            tensors.as_dense(input), record.tail, *arguments[:6], arguments.residual
        )
        if record.state is None:
            if arguments.mask is None:
                formulas.check_input_size(input)
            else:
                formulas.check_more_than_one_value(message, input.size(1))
    except Exception as error:
        raise failures.abort(error, record, input, arguments) from None
    return all_reduce(message, record)


def _begin(*values: Any) -> tuple[PassRecord, Arguments]:
    *fields, identity, group_name, _ = values
    layer, direction = identity_from(identity), _compat.forward_direction()
    record = named_record(group_name, layer, direction)
    failures.check_before(record)
    return record, Arguments(*fields)


@torch.library.register_fake("syncbn::compiled_forward")
def _(input: Tensor, *values: Any) -> Tensor:
    if not isinstance(input, _compat.FakeTensor):  # the graph runs with a tensor on meta
        record, arguments = _begin(*values)
        try:
            checks.check_training(input, arguments)
            ops.check_arguments(input, *arguments.for_checks(), mask=arguments.mask)
        except Exception as error:
            raise failures.abort(error, record, input, arguments) from None
    channels = input.size(1) if input.dim() > 1 else 1
    return input.new_empty(2 * channels + 1, dtype=torch.float64)


# Returns the sums of dz and of dz * xhat over the group; after them, in a group, a number without
# a meaning.
_library.define(
    "compiled_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
    "ScalarType weight_dtype, ScalarType bias_dtype, Tensor? mask, SymInt identity, "
    "str? group_name, Tensor? previous) "
    "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias)",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl(_library, "compiled_backward", "CompositeExplicitAutograd")
def _(grad_output: Tensor, input: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
    *operands, mask, identity, group_name, _ = values
    layer = identity_from(identity)
    record = named_record(group_name, layer, "backward")
    failures.check_before(record)
    if passes.library is not None and mask is None:
        sums = passes.library.sum_gradients(grad_output, input, *operands, record)
        if sums is not None:
            return verify(sums[0], record), *sums[1:]
    try:
        if not (input.is_contiguous() and grad_output.is_contiguous()):
            input = tensors.as_dense(input)
            grad_output = tensors.as_dense(grad_output, like=input)
        operators = ops.usual if mask is None else ops.around(mask)
        sums, grad_weight, grad_bias = operators.batch_norm_backward_reduce(
            grad_output, input, *operands, record.tail
        )
    except Exception as error:
        raise failures.abort(error, record, input) from None
    sums = verify(all_reduce(sums, record), record)
    return sums, grad_weight, grad_bias


@torch.library.register_fake("syncbn::compiled_backward")
def _(grad_output: Tensor, input: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
    operator = torch.ops.syncbn.batch_norm_backward_reduce.default
    sums, grad_weight, grad_bias = operator(grad_output, input, *values[:4])
    *_, group_name, _ = values
    return sums if group_name is None else sums.new_empty(sums.size(0) + 1), grad_weight, grad_bias
