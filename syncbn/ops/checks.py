"""The argument checks of the functional form and the module, each with its own words.

They run before the first collective. Ranks of a valid program may differ, as in the batch size:
no check here compares ranks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from syncbn import _compat
from syncbn.ops import _extension, epilogue, fallback, masks
from syncbn.ops.arguments import Arguments, is_number

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_VECTOR_DTYPES = {dtype: (torch.float32, dtype, torch.float64) for dtype in _FLOAT_DTYPES}


def check_training(input: Tensor, arguments: Arguments, *, single_process: bool) -> None:
    """Make the checks of a training pass.

    Of a single process the joined operator makes a part of them: :func:`explain`. In a group that
    would be too late, because the ranks have met by then. The operators of
    :mod:`syncbn.ops.fallback` check nothing.

    Raises:
        TypeError, ValueError, NotImplementedError: As the checks below do.
    """
    is_plain = not _compat.are_transforms_active() and _compat.jit_tracing_state() is None
    if is_plain and _is_ordinary(input, arguments):
        # Almost always nothing is wrong, which takes a fraction of the time to see.
        if single_process:
            if input.numel() != input.size(1) and input.device.type in _extension.device_types:
                return
        elif _is_input_ordinary(input) and _are_vectors_ordinary(input, arguments):
            return
    check_all(input, arguments, single_process=single_process)
    fallback.check_device(input.device)


def check_all(input: Tensor, arguments: Arguments, *, single_process: bool) -> None:
    """Make all checks of a training pass.

    Raises:
        TypeError, ValueError, NotImplementedError: As the checks below do.
    """
    check_no_transform()
    check_local(input)
    check_input(input, arguments.num_features, arguments.dims)
    check_channel_vectors(input, arguments)
    check_running(arguments)
    check_not_expanded(arguments)
    check_epilogue(input, arguments)
    check_mask(input, arguments.mask)
    check_eps(arguments.eps)
    if arguments.momentum is not None or arguments.num_batches_tracked is None:
        check_momentum(arguments.momentum)
    if single_process:
        check_more_than_one_value(input)


def explain(error: Exception, input: Tensor, arguments: Arguments) -> Exception:
    """Return the checks' error for arguments that an operator has refused, or its own error."""
    try:
        check_all(input, arguments, single_process=True)
    except (TypeError, ValueError, NotImplementedError) as found:
        return found
    return error


def check_evaluation(input: Tensor, arguments: Arguments) -> None:
    """Make all checks of an evaluation pass, which takes any momentum.

    Raises:
        TypeError, ValueError: As the checks below do.
    """
    if (
        _is_ordinary(input, arguments)
        and _is_input_ordinary(input)
        and _are_vectors_ordinary(input, arguments)
    ):
        return
    check_input(input, arguments.num_features, arguments.dims)
    check_channel_vectors(input, arguments)
    check_running(arguments)
    check_epilogue(input, arguments)
    check_mask(input, arguments.mask)
    check_eps(arguments.eps)


def _is_input_ordinary(input: Tensor) -> bool:
    """Return whether the checks of layout and dtype surely pass; they may pass if not."""
    return input.layout is torch.strided and input.dtype in _VECTOR_DTYPES


def _is_ordinary(input: Tensor, arguments: Arguments) -> bool:
    """Return whether the checks that no operator makes surely pass.

    Every attribute of a tensor costs about as much as a line of Python, every call as much as two.
    """
    *_, counter, momentum, eps, num_features, residual, activation, _, dims, mask = arguments
    return (
        (type(input) is Tensor or (isinstance(input, Tensor) and not _is_distributed(input)))
        and not input.is_nested
        and len(shape := input.shape) >= 2
        and (dims is None or len(shape) in dims)
        and shape[1] > 0
        and (num_features is None or shape[1] == num_features)
        and (counter is None or counter.dtype is torch.int64)
        and (
            counter is not None
            if momentum is None
            else type(momentum) is float and -math.inf < momentum < math.inf
        )
        and type(eps) is float
        and 0 <= eps < math.inf
        and (
            (residual is None and activation is None and mask is None)
            or _are_others_ordinary(input, arguments)
        )
    )


def _are_vectors_ordinary(input: Tensor, arguments: Arguments) -> bool:
    """Return whether the checks of the vectors surely pass with an ordinary input."""
    vector_dtypes = _VECTOR_DTYPES[input.dtype]
    # Not is_cpu, which takes less time: it would stay in graphs of torch.compile as a call.
    channels, device = input.size(1), input.device
    weight, bias, running_mean, running_var, counter, *_ = arguments
    for vector in (weight, bias, running_mean, running_var):
        if vector is not None and (
            not isinstance(vector, Tensor)
            or vector.dtype not in vector_dtypes
            or vector.shape != (channels,)
            or vector.device != device
        ):
            return False
    if running_mean is None or running_var is None:
        if running_mean is not running_var:
            return False
    elif running_mean.stride(0) == 0 or running_var.stride(0) == 0:
        return False
    return counter is None or (counter.numel() == 1 and counter.device == device)


def _are_others_ordinary(input: Tensor, arguments: Arguments) -> bool:
    try:
        check_epilogue(input, arguments)
        check_mask(input, arguments.mask)
    except (TypeError, ValueError):
        return False
    return True


def check_local(input: object) -> None:
    """Raise TypeError for a DTensor, which the operators of training do not take."""
    if _is_distributed(input):
        raise TypeError(
            "expected input to be a local tensor, but got a DTensor; normalize input.to_local() "
            "with the mesh as process_group, and make a DTensor of the output: "
            "DTensor.from_local(output, input.device_mesh, input.placements)"
        )


def _is_distributed(input: object) -> bool:
    return hasattr(input, "to_local")  # not by its class, which takes an import of a second


def check_input(
    input: object, num_features: int | None = None, dims: Sequence[int] | None = None
) -> None:
    """Check the input of a pass, in training or evaluation.

    Raises:
        TypeError: Not a tensor, not strided, quantized, or not of a floating dtype.
        ValueError: Not one of ``dims`` dimensions, or fewer than 2; no channels, or not
            ``num_features`` of them.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"expected input to be a torch.Tensor, but got {type(input).__name__}")
    if input.layout != torch.strided:
        raise TypeError(
            f"expected a dense input, but got layout {input.layout}; call .to_dense() first"
        )
    if input.is_nested:
        raise TypeError(
            "expected a dense input, but got a nested tensor; call .to_padded_tensor() first"
        )
    if input.is_quantized or input.dtype not in _FLOAT_DTYPES:
        raise TypeError(
            "expected input of dtype float16, bfloat16, float32 or float64, but got "
            f"{_dtype_name(input.dtype)}"
        )
    if input.dim() < 2 or (dims is not None and input.dim() not in dims):
        expected = "at least 2D" if dims is None else " or ".join(f"{number}D" for number in dims)
        raise ValueError(f"expected {expected} input (got {input.dim()}D input)")
    if input.size(1) == 0:
        raise ValueError("SyncBatchNorm number of input channels should be non-zero")
    if num_features is not None and input.size(1) != num_features:
        raise ValueError(
            f"expected input to have {num_features} channels (num_features), but got "
            f"{input.size(1)} in input of shape {list(input.shape)}"
        )


def check_channel_vectors(input: Tensor, arguments: Arguments) -> None:
    """Check weight, bias, running_mean and running_var against a checked input.

    Raises:
        TypeError: Not a tensor, or not in the input's dtype, float32 or float64.
        ValueError: Not one value per channel, or not on the input's device.
    """
    channels = input.size(1)
    for name in ("weight", "bias", "running_mean", "running_var"):
        vector = getattr(arguments, name)
        if vector is None:
            continue
        if not isinstance(vector, Tensor):
            raise TypeError(
                f"expected {name} to be a torch.Tensor or None, but got {type(vector).__name__}"
            )
        if vector.dim() != 1 or vector.size(0) != channels:
            raise ValueError(
                f"expected {name} to have shape [{channels}], but got {list(vector.shape)}"
            )
        if vector.dtype not in _VECTOR_DTYPES[input.dtype]:
            own = f"{_dtype_name(input.dtype)}, " if input.dtype.itemsize == 2 else ""
            raise TypeError(
                f"expected {name} to have dtype {own}float32 or float64, but got "
                f"{_dtype_name(vector.dtype)}"
            )
        if vector.device != input.device:
            raise ValueError(
                f"expected {name} to be on {input.device}, the device of input, but got "
                f"{vector.device}"
            )


def check_running(arguments: Arguments) -> None:
    """Check that both running statistics are given or neither, and the batch counter.

    Raises:
        TypeError: The counter is not one number.
        ValueError: Only one of the running statistics, or a counter on another device.
    """
    running_mean, running_var = arguments.running_mean, arguments.running_var
    num_batches_tracked = arguments.num_batches_tracked
    if (running_mean is None) != (running_var is None):
        got = "running_mean" if running_var is None else "running_var"
        raise ValueError(
            f"expected both of running_mean and running_var or neither, but got only {got}"
        )
    if num_batches_tracked is None:
        return
    dtype = num_batches_tracked.dtype
    if dtype is torch.bool or dtype.is_complex or num_batches_tracked.numel() != 1:
        raise TypeError(
            "expected num_batches_tracked to be one number, but got "
            f"{_dtype_name(dtype)} of shape {list(num_batches_tracked.shape)}"
        )
    if running_mean is not None and num_batches_tracked.device != running_mean.device:
        raise ValueError(
            f"expected num_batches_tracked to be on {running_mean.device}, the device of "
            f"running_mean, but got {num_batches_tracked.device}"
        )


def check_not_expanded(arguments: Arguments) -> None:
    """Raise ValueError if channels share memory in the running statistics, which are written."""
    for name in ("running_mean", "running_var"):
        vector = getattr(arguments, name)
        if vector is not None and vector.stride(0) == 0 and vector.size(0) > 1:
            raise ValueError(
                f"expected {name} to have memory for each channel, but it is expanded; "
                "call .clone() first"
            )


def check_epilogue(input: Tensor, arguments: Arguments) -> None:
    """Check residual and activation against a checked input.

    Raises:
        TypeError: The residual is not a tensor, not strided, or not of the input's dtype.
        ValueError: It is not of the input's shape or not on its device; an unknown activation, or a
            slope that is negative or not finite.
    """
    epilogue.check_activation(arguments.activation)
    epilogue.check_negative_slope(arguments.negative_slope)
    residual = arguments.residual
    if residual is None:
        return
    if not isinstance(residual, Tensor):
        raise TypeError(
            f"expected residual to be a torch.Tensor or None, but got {type(residual).__name__}"
        )
    if residual.layout != torch.strided or residual.is_nested:
        kind = "a nested tensor" if residual.is_nested else f"layout {residual.layout}"
        raise TypeError(f"expected a dense residual, but got {kind}")
    if residual.dtype != input.dtype:
        raise TypeError(
            f"expected residual to have dtype {_dtype_name(input.dtype)}, the dtype of input, but "
            f"got {_dtype_name(residual.dtype)}"
        )
    if residual.shape != input.shape:
        raise ValueError(
            f"expected residual to have shape {list(input.shape)}, the shape of input, but got "
            f"{list(residual.shape)}"
        )
    if residual.device != input.device:
        raise ValueError(
            f"expected residual to be on {input.device}, the device of input, but got "
            f"{residual.device}"
        )


def check_mask(input: Tensor, mask: object) -> None:
    """Check a mask against a checked input.

    Raises:
        TypeError: Not a tensor, not strided, or not bool.
        ValueError: Not of the input's positions, or not on its device.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"expected mask to be a torch.Tensor or None, but got {type(mask).__name__}"
        )
    if mask.dtype is not torch.bool:
        raise TypeError(
            f"expected mask to have dtype bool, but got {_dtype_name(mask.dtype)}; compare it with "
            "what is valid, as in mask > 0"
        )
    if mask.layout != torch.strided or mask.is_nested:
        kind = "a nested tensor" if mask.is_nested else f"layout {mask.layout}"
        raise TypeError(f"expected a dense mask, but got {kind}")
    if not masks.broadcasts(mask, input):
        positions = list(input.shape[:1] + input.shape[2:])
        with_one = [positions[0], 1, *positions[1:]]
        raise ValueError(
            f"expected mask to have shape {positions} or {with_one}, one value for each position "
            f"of input, or sizes of 1 there, but got {list(mask.shape)}"
        )
    if mask.device != input.device:
        raise ValueError(
            f"expected mask to be on {input.device}, the device of input, but got {mask.device}"
        )


def check_eps(eps: object) -> None:
    """Raise TypeError unless ``eps`` is a number, ValueError unless finite and not negative."""
    if not is_number(eps):
        raise TypeError(f"expected eps to be a number, but got {type(eps).__name__}")
    if not 0 <= float(eps) < math.inf:
        raise ValueError(f"expected eps to be finite and not negative, but got {eps}")


def check_momentum(momentum: object) -> None:
    """Raise TypeError unless ``momentum`` is a number, ValueError unless it is finite."""
    if not is_number(momentum):
        raise TypeError(f"expected momentum to be a number, but got {type(momentum).__name__}")
    if not math.isfinite(float(momentum)):
        raise ValueError(f"expected momentum to be finite, but got {momentum}")


def check_no_transform() -> None:
    """Raise NotImplementedError inside of a transform of torch.func or a trace of torch.jit."""
    if _compat.are_transforms_active():
        raise NotImplementedError(
            "SyncBatchNorm in training mode cannot be transformed by torch.func (grad, vmap, jvp, "
            "...); torch.autograd.grad differentiates it to any order, and "
            "syncbn.revert_sync_batchnorm makes layers of one process that can be transformed"
        )
    if _compat.jit_tracing_state() is not None:
        raise NotImplementedError(
            "SyncBatchNorm in training mode cannot be traced by torch.jit.trace; call eval() or "
            "syncbn.revert_sync_batchnorm first"
        )


def check_more_than_one_value(input: Tensor) -> None:
    """Raise ValueError where a single process would compute a variance from one value."""
    if input.numel() == input.size(1):
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.size()}"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
