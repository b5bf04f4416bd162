"""The layer in training inside a compiled graph, where the compiler can fuse it.

Sums over the batch and the update of the running statistics stay operators. The element-wise halves
are plain tensor expressions, which Inductor fuses with the residual and the activation behind them;
their formulas stand in csrc/common/formulas.h. The operators here are written in Python for two
reasons: they take inputs of any strides, so that the compiler may choose the layout, and when the
graph runs they know more than its tracer did, such as whether it runs as a recomputation.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncbn import _autograd, _compat, ops
from syncbn.distributed import collectives, protocol, sync
from syncbn.distributed.collectives import ProcessGroup
from syncbn.distributed.layer_id import (
    GRAPH_INPUT_TYPE,
    GraphInput,
    Identity,
    Layer,
    identity_from,
)
from syncbn.distributed.sync import Pass
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
    # The value of a float may be variable; compiled_stats checks it.
    if type(arguments.eps) is not float:
        checks.check_eps(arguments.eps)
    if type(arguments.momentum) is not float and arguments.momentum is not None:
        checks.check_momentum(arguments.momentum)
    if arguments.mask is not None:
        arguments = arguments._replace(mask=masks.as_positions(arguments.mask, input))
    group_name = None if group is None else group.group_name
    identities: tuple[GraphInput | None, GraphInput | None] = (None, None)
    if not isinstance(layer, (Identity, str)):
        identities = layer._syncbn.graph_inputs
    output: Tensor = _compiled_train(input, *arguments, group_name, *identities)
    return output


def _fitting_tensors(input: Tensor, arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors that a graph can be traced with, by name.

    For the others compiled_stats raises the error of an eager layer when the graph runs.
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
    """As :class:`syncbn._autograd.SyncBatchNormFunction`, to be traced by AOTAutograd.

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
        identity: GraphInput | None,
        of_backward: GraphInput | None,
    ) -> Tensor:
        """Return the normalized input.

        Weight, bias and mask are None, unlike in ``arguments``, if they do not fit into a graph.
        """
        _, _, *running, momentum, eps = arguments.for_operators()
        if any(vector is not None and _is_expanded(vector) for vector in running[:2]):
            running = [None, None, None]  # compiled_stats refuses them; no graph could write them
        # A new tensor for each call. Otherwise the compiler would merge calls with equal arguments,
        # such as two layers on one input, and ranks that run uncompiled would wait for the second.
        # On the input's device: Inductor keeps operators on two devices out of CUDA graphs.
        call = torch.empty(0, device=input.device)
        totals: Tensor = torch.ops.syncbn.compiled_stats.default(
            input, *arguments, group_name, call, identity
        )
        if group_name is not None:
            totals = _compat.all_reduce(totals, group_name)
        mean, invstd, count = torch.ops.syncbn.compiled_update.default(
            totals, *running, momentum, eps, input.dtype, group_name, identity
        )
        if group_name is not None:
            count = _compat.wait(count)  # compilers keep this operator, and so the ones before it
        dtype = tensors.compute_dtype(input)
        rounded_mean = tensors.cast(mean, dtype)
        scale, shift = formulas.normalize_constants(mean, rounded_mean, invstd, weight, bias)
        center, scale, shift = _per_channel(dtype, input, mean, scale, shift)
        output = torch.addcmul(shift, tensors.cast(input, dtype) - center, scale)
        if mask is not None:  # a masked NaN must not reach the derivative of the epilogue
            output = masks.clear(output, mask)
        ctx.save_for_backward(input, weight, mean, invstd, count, mask)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group_name, ctx.identity = group_name, of_backward
        return tensors.cast(output, input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        input, weight, mean, invstd, count, mask = ctx.saved_tensors
        group_name, identity = ctx.group_name, ctx.identity
        sums, grad_weight, grad_bias = torch.ops.syncbn.compiled_backward_reduce.default(
            grad_output,
            input,
            mean,
            invstd,
            torch.float64 if weight is None else weight.dtype,
            ctx.bias_dtype or torch.float64,
            group_name,
            identity,
            mask,
        )
        if group_name is not None:
            sums = _compat.all_reduce(sums, group_name)
            sums = torch.ops.syncbn.compiled_wait.default(sums, group_name, identity)
            sums = _compat.wait(sums)[: 2 * mean.size(0)]
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
            *(None,) * 5,
        )


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
    "Tensor? residual, str? activation, float negative_slope, int[]? dims, Tensor? mask"
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
_library.define(
    f"{_TRAIN}(Tensor input, {_ARGUMENTS}, str? group_name, {GRAPH_INPUT_TYPE}? identity, "
    f"{GRAPH_INPUT_TYPE}? of_backward) -> Tensor"
)


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

# All arguments of the layer, which are checked when the graph runs.
_library.define(
    f"compiled_stats(Tensor input, {_ARGUMENTS}, str? group_name, Tensor call, "
    f"{GRAPH_INPUT_TYPE}? identity=None) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl(_library, "compiled_stats", "CompositeExplicitAutograd")
def _(input: Tensor, *values: Any) -> Tensor:
    step, arguments = _begin(input, *values)
    with step:
        checks.check_training(input, arguments)
        if step.group is None:
            formulas.check_input_size(input)
        message = ops.batch_norm_stats(
            tensors.as_dense(input), step.tail, *arguments.for_checks(), mask=arguments.mask
        )
    step.meet(message)
    return message


def _begin(input: Tensor, *values: Any) -> tuple[Pass, Arguments]:
    fields, (group_name, _, *identity) = values[:_NUM_ARGUMENTS], values[_NUM_ARGUMENTS:]
    layer = identity_from(*identity)
    group, arguments = sync.group_named(group_name, layer), Arguments(*fields)
    return Pass(group, layer, _compat.forward_direction(), input, arguments), arguments


@torch.library.register_fake("syncbn::compiled_stats")
def _(input: Tensor, *values: Any) -> Tensor:
    if not isinstance(input, _compat.FakeTensor):  # the graph runs with a tensor on meta
        step, arguments = _begin(input, *values)
        with step:
            checks.check_training(input, arguments)
            ops.check_arguments(input, *arguments.for_checks(), mask=arguments.mask)
    channels, group_name = input.size(1) if input.dim() > 1 else 1, values[_NUM_ARGUMENTS]
    return input.new_empty(2 * channels + (1 if group_name is None else 4), dtype=torch.float64)


# Waits for the forward pass's collective, if there is a group. Then batch_norm_apply without the
# normalization; it updates nothing where the graph runs as a recomputation.
_library.define(
    "compiled_update(Tensor totals, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches_tracked, float? momentum, float eps, ScalarType input_dtype, "
    f"str? group_name, {GRAPH_INPUT_TYPE}? identity=None)"
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
    group_name: str | None,
    identity: GraphInput | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    layer = identity_from(identity)
    step = Pass(sync.group_named(group_name, layer), layer, _compat.forward_direction())
    channels = _channels(totals, group_name)
    totals = step.wait(totals)
    if step.direction == "recomputation":  # the sums may be the forward pass's
        totals, step = step.verify(totals), Pass(None, layer, step.direction)
    arguments = Arguments(
        None, None, running_mean, running_var, num_batches_tracked, momentum, float(eps)
    )
    no_input = totals.new_empty((0, channels), dtype=input_dtype)
    _, mean, invstd, count = _autograd.normalize(no_input, totals, arguments, step)
    return mean, invstd, count


def _channels(totals: Tensor, group_name: str | None) -> int:
    size = totals.size(0)
    return size // 2 if group_name is None else protocol.channels_of(size)


@torch.library.register_fake("syncbn::compiled_update")
def _(totals: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
    channels = _channels(totals, values[6])
    return totals.new_empty(channels), totals.new_empty(channels), totals.new_empty(1)


_library.define(
    "compiled_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, "
    "ScalarType weight_dtype, ScalarType bias_dtype, str? group_name=None, "
    f"{GRAPH_INPUT_TYPE}? identity=None, Tensor? mask=None) "
    "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias)",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.impl(_library, "compiled_backward_reduce", "CompositeExplicitAutograd")
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    group_name: str | None = None,
    identity: GraphInput | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    layer = identity_from(identity)
    step = Pass(sync.group_named(group_name, layer), layer, "backward", input)
    with step:
        input = tensors.as_dense(input)
        grad_output = tensors.as_dense(grad_output, like=input)
        dtypes = (weight_dtype, bias_dtype)
        sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
            grad_output, input, mean, invstd, *dtypes, step.tail, mask=mask
        )
    step.meet(sums)
    return sums, grad_weight, grad_bias


@torch.library.register_fake("syncbn::compiled_backward_reduce")
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    group_name: str | None = None,
    identity: GraphInput | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sums, *gradients = ops.batch_norm_backward_reduce(
        grad_output, input, mean, invstd, weight_dtype, bias_dtype
    )
    grad_weight, grad_bias = gradients
    size = sums.size(0) + (0 if group_name is None else 4)
    return sums.new_empty(size), grad_weight, grad_bias


# Waits for the backward pass's collective and verifies the sums. Returns them without their tail.
_library.define(
    f"compiled_wait(Tensor reduced, str group_name, {GRAPH_INPUT_TYPE}? identity=None) -> Tensor"
)


@torch.library.impl(_library, "compiled_wait", "CompositeExplicitAutograd")
def _(reduced: Tensor, group_name: str, identity: GraphInput | None = None) -> Tensor:
    step = Pass(collectives.group_named(group_name), identity_from(identity), "backward")
    return step.verify(step.wait(reduced))


@torch.library.register_fake("syncbn::compiled_wait")
def _(reduced: Tensor, group_name: str, identity: GraphInput | None = None) -> Tensor:
    return reduced.new_empty(reduced.size(0) - 3)
