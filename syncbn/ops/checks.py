"""The checks of a pass that need Python: of objects, numbers, dimensions and transforms.

csrc/common/checks.h has the checks of tensors. The first operator of a pass makes them. Ranks of a
valid program may differ, as in the batch size: no check compares ranks.
"""

import math
from typing import Any

import torch
from torch import Tensor

from syncbn import _compat
from syncbn.ops import epilogue, fallback, masks
from syncbn.ops.arguments import Arguments, is_number


def checked(input: Tensor, arguments: Arguments) -> Arguments:
    """Make the checks of a training pass that no operator makes; return what operators take.

    That is floats, and a mask as :func:`syncbn.ops.masks.as_positions` returns it.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`check_training`.
    """
    arguments = arguments.plain()
    check_training(input, arguments)
    momentum, mask = arguments.momentum, arguments.mask
    return arguments._replace(
        momentum=None if momentum is None else float(momentum),
        eps=float(arguments.eps),
        negative_slope=float(arguments.negative_slope),
        mask=None if mask is None else masks.as_positions(mask, input),
    )


def check_training(input: Tensor, arguments: Arguments) -> None:
    """Make the checks of a training pass that no operator makes.

    Raises:
        TypeError, ValueError, NotImplementedError: As the checks below do.
    """
    if _compat.are_transforms_active() or _compat.jit_tracing_state() is not None:
        check_no_transform()
    if type(input) is not Tensor:
        check_local(input)
    check_call(input, arguments)
    if not input.is_cpu:
        fallback.check_device(input.device)
    momentum = arguments.momentum
    if type(momentum) is float and -math.inf < momentum < math.inf:
        return
    if momentum is not None or arguments.num_batches_tracked is None:
        check_momentum(momentum)


def check_call(input: Tensor, arguments: Arguments) -> None:
    """Make the checks of a pass, in training or evaluation, that no operator makes.

    Raises:
        TypeError: The input is not a tensor, or a number is not one.
        ValueError: A number of dimensions or channels that the layer does not take; ``eps``,
            ``negative_slope`` or ``activation``, as the checks below.
    """
    if type(input) is not Tensor:
        check_objects(input, arguments)
    dims, num_features = arguments.dims, arguments.num_features
    shape = input.shape
    number = len(shape)
    if number < 2 or (dims is not None and number not in dims):
        expected = "at least 2D" if dims is None else " or ".join(f"{dim}D" for dim in dims)
        raise ValueError(f"expected {expected} input (got {number}D input)")
    if num_features is not None and shape[1] not in (num_features, 0):
        check_channels(shape, arguments)
    eps = arguments.eps
    if type(eps) is not float or not 0 <= eps < math.inf:
        check_eps(eps)
    slope = arguments.negative_slope
    if arguments.activation is not None or type(slope) is not float or slope != 0.01:
        epilogue.check_activation(arguments.activation)
        epilogue.check_negative_slope(arguments.negative_slope)


def check_channels(shape: torch.Size, arguments: Arguments) -> None:
    """Raise ValueError for an input of other channels than ``num_features``.

    The size of weight, bias and running statistics decides where there are some. Torch never
    compares ``num_features``: pruning leaves it, and lazy layers may keep 0.
    """
    vectors = [vector for vector in arguments.vectors if vector is not None]
    fits = all(vector.shape == shape[1:2] for vector in vectors)
    if not fits or (not vectors and arguments.num_features != 0):
        raise ValueError(
            f"expected input to have {arguments.num_features} channels (num_features), but got "
            f"{shape[1]} in input of shape {list(shape)}"
        )


def explain(error: Exception, input: object, arguments: Arguments) -> Exception:
    """Return the error for objects of a wrong type, which may have caused another error."""
    try:
        check_objects(input, arguments)
    except TypeError as found:
        return found
    return error


def check_objects(input: object, arguments: Arguments) -> None:
    """Raise TypeError unless all tensors of a pass are tensors of a kind that operators take."""
    if not isinstance(input, Tensor):
        raise TypeError(f"expected input to be a torch.Tensor, but got {type(input).__name__}")
    check_dense("input", input)
    if input.is_quantized:
        raise TypeError(
            "expected input of dtype float16, bfloat16, float32 or float64, but got "
            f"{str(input.dtype).removeprefix('torch.')}"
        )
    for name in (*Arguments._fields[:5], "residual", "mask"):
        value = getattr(arguments, name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"expected {name} to be a torch.Tensor or None, but got {type(value).__name__}"
            )
        check_dense(name, value)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a nested or sparse tensor."""
    if tensor.is_nested:
        raise TypeError(
            f"expected a dense {name}, but got a nested tensor; call .to_padded_tensor() first"
        )
    if tensor.layout != torch.strided:
        raise TypeError(
            f"expected a dense {name}, but got layout {tensor.layout}; call .to_dense() first"
        )


def check_local(input: Any) -> None:
    """Raise TypeError for a DTensor, which the operators of training do not take."""
    if hasattr(input, "to_local"):  # not by its class, which takes an import of a second
        raise TypeError(
            "expected input to be a local tensor, but got a DTensor; normalize input.to_local() "
            "with the mesh as process_group, and make a DTensor of the output: "
            "DTensor.from_local(output, input.device_mesh, input.placements)"
        )


def check_eps(eps: Any) -> None:
    """Raise TypeError unless ``eps`` is a number, ValueError unless finite and not negative."""
    if type(eps) is not float and not is_number(eps):
        raise TypeError(f"expected eps to be a number, but got {type(eps).__name__}")
    if not 0 <= float(eps) < math.inf:
        raise ValueError(f"expected eps to be finite and not negative, but got {eps}")


def check_momentum(momentum: Any) -> None:
    """Raise TypeError unless ``momentum`` is a number, ValueError unless it is finite."""
    if type(momentum) is not float and not is_number(momentum):
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
