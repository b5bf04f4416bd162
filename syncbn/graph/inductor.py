"""The layer in training inside a compiled graph, where the compiler can fuse it.

The sums of a pass and their collective are one operator, the update of the running statistics is
another. The element-wise halves are plain tensor expressions, which Inductor fuses with the
residual and the activation behind them; their formulas stand in csrc/common/formulas.h. The
operators here are written in Python for two reasons: they take inputs of any strides, so that the
compiler may choose the layout, and when the graph runs they know more than its tracer did, such as
whether it runs as a recomputation.
"""

import hashlib
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from syncbn import _compat, ops, training
from syncbn.distributed import collectives, failures
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import Identity, Layer, identity_from
from syncbn.distributed.state import PassRecord, channels_of, size_of
from syncbn.ops import checks, epilogue, formulas, masks, tensors
from syncbn.ops.arguments import Arguments

PACKAGE = Path(__file__).parents[1]
_NUM_ARGUMENTS = len(Arguments._fields)
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    is_named = isinstance(layer, (Identity, str))
    identity = 0 if is_named else layer.graph_input  # type: ignore[union-attr]
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
        # A partition that computed the sums again would make another collective.
        with _compat.saved_in_graphs():
            mean, invstd, count, totals = _in_order(
                torch.ops.syncbn.compiled_forward.default,
                group_name,
                *(input, *_to_be_checked(input, arguments), identity),
            )
        running = [None if v is None or _is_expanded(v) else v for v in arguments[2:5]]
        if running != [None, None, None]:
            _compat.run_updates_in_selective_checkpoints()
            torch.ops.syncbn.compiled_update.default(
                totals, *running, arguments.momentum, input.dtype, identity, group_name
            )
        elif group_name is not None:
            count = _compat.wait(count)  # compilers keep this operator, and so the one before it
        dtype = tensors.compute_dtype(input)
        rounded_mean = tensors.cast(mean, dtype)
        scale, shift = formulas.normalize_constants(mean, rounded_mean, invstd, weight, bias)
        center, scale, shift = _per_channel(dtype, input, mean, scale, shift)
        output = torch.addcmul(shift, tensors.cast(input, dtype) - center, scale)
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
            dtype = tensors.compute_dtype(input)
            rounded_mean = tensors.cast(mean, dtype)
            slope, shift, scale = formulas.grad_input_constants(
                mean, rounded_mean, invstd, weight, sums, count
            )
            center, slope, shift, scale = _per_channel(dtype, input, mean, slope, shift, scale)
            grad_input = torch.addcmul(shift, tensors.cast(input, dtype) - center, slope)
            grad_input = torch.addcmul(grad_input, tensors.cast(grad_output, dtype), scale)
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
    _last_results[tracer] = results[-1]
    return results


def _to_be_checked(input: Tensor, arguments: Arguments) -> Arguments:
    """Return the arguments without running statistics, where those need no check.

    A graph that needs them for its sums could not compute those again after their update.
    """
    vector, alike = input.shape[1:2], {input.dtype, torch.float32, torch.float64}
    _, _, running_mean, running_var, counter, *_ = arguments
    fit = (running_mean is None) == (running_var is None)
    for v in (running_mean, running_var):
        if v is not None:
            fit &= v.shape == vector and v.dtype in alike and not _is_expanded(v)
    if counter is not None:
        fit &= counter.shape == () and counter.dtype == torch.int64
    fit &= all(v is None or v.device == input.device for v in arguments[2:5])
    return arguments.without_running() if fit else arguments


def _is_expanded(vector: Tensor) -> bool:
    return vector.dim() == 1 and vector.size(0) > 1 and vector.stride(0) == 0


def _per_channel(dtype: torch.dtype, input: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Return values [C] in ``dtype`` to be combined with ``input``, computed once per channel."""
    constants = tensors.cast(torch.stack(values), dtype)
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

# Takes the arguments of the layer, which it checks when the graph runs; it writes none. The totals
# are those of compiled_update.
_library.define(
    f"compiled_forward(Tensor input, {_ARGUMENTS}, SymInt identity, str? group_name, "
    "Tensor? previous) -> (Tensor mean, Tensor invstd, Tensor count, Tensor totals)",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl(_library, "compiled_forward", "CompositeExplicitAutograd")
def _(input: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    record, arguments = _begin(input, *values)
    try:
        if not training.are_as_before(input, arguments, record):
            checks.check_training(input, arguments)
            record.checked, record.num_dims = arguments[5:11], input.dim()
        if record.state is None:
            formulas.check_input_size(input)
        operators = ops.usual if arguments.mask is None else ops.around(arguments.mask)
        message = operators.batch_norm_stats(
            tensors.as_dense(input), record.tail, *arguments[:6], arguments.residual
        )
    except Exception as error:
        raise failures.abort(error, record, input, arguments) from None
    totals = training.all_reduce(message, record)
    no_input = input.new_empty((0, input.size(1)))
    numbers = Arguments(None, None, None, None, None, 0.0, arguments.eps)
    _, mean, invstd, count = training.normalize(no_input, totals, numbers, record)
    return mean, invstd, count, totals


def _begin(input: Tensor, *values: Any) -> tuple[PassRecord, Arguments]:
    *fields, identity, group_name, _ = values
    layer, direction = identity_from(identity), _compat.forward_direction()
    record = training.named_record(group_name, layer, direction)
    failures.check_before(record)
    return record, Arguments(*fields)


@torch.library.register_fake("syncbn::compiled_forward")
def _(input: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not isinstance(input, _compat.FakeTensor):  # the graph runs with a tensor on meta
        record, arguments = _begin(input, *values)
        try:
            checks.check_training(input, arguments)
            ops.check_arguments(input, *arguments.for_checks(), mask=arguments.mask)
        except Exception as error:
            raise failures.abort(error, record, input, arguments) from None
    channels = input.size(1) if input.dim() > 1 else 1
    *_, group_name, _ = values
    size = 2 * channels + 1 if group_name is None else size_of(channels)
    mean, invstd, count, totals = (
        input.new_empty(number, dtype=torch.float64) for number in (channels, channels, 1, size)
    )
    return mean, invstd, count, totals


# Updates nothing where the graph runs as a recomputation.
_library.define(
    "compiled_update(Tensor totals, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches_tracked, float? momentum, ScalarType input_dtype, SymInt identity, "
    "str? group_name) -> ()"
)


@torch.library.impl(_library, "compiled_update", "CompositeExplicitAutograd")
def _(totals: Tensor, *values: Any) -> None:
    mean, var, counter, momentum, input_dtype, identity, group_name = values
    layer, direction = identity_from(identity), _compat.forward_direction()
    if direction == "recomputation":
        return
    record = training.named_record(group_name, layer, direction)
    size = totals.size(0)
    channels = size // 2 if group_name is None else channels_of(size)
    arguments = Arguments(None, None, mean, var, counter, momentum, eps=1.0)
    no_input = totals.new_empty((0, channels), dtype=input_dtype)
    training.normalize(no_input, totals, arguments, record)


@torch.library.register_fake("syncbn::compiled_update")
def _(*_: Any) -> None:
    pass


# Returns the sums of the group, verified and without their tail.
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
    record = training.named_record(group_name, layer, "backward")
    failures.check_before(record)
    try:
        input = tensors.as_dense(input)
        grad_output = tensors.as_dense(grad_output, like=input)
        operators = ops.usual if mask is None else ops.around(mask)
        sums, grad_weight, grad_bias = operators.batch_norm_backward_reduce(
            grad_output, input, *operands, record.tail
        )
    except Exception as error:
        raise failures.abort(error, record, input) from None
    sums = training.verify(training.all_reduce(sums, record), record)
    return sums[: 2 * input.size(1)], grad_weight, grad_bias


@torch.library.register_fake("syncbn::compiled_backward")
def _(grad_output: Tensor, input: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
    operator = torch.ops.syncbn.batch_norm_backward_reduce.default
    sums, grad_weight, grad_bias = operator(grad_output, input, *values[:4])
    return sums, grad_weight, grad_bias
