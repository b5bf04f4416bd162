"""Memory formats and dtypes of tensors, as the operators take them."""

import torch
from torch import Tensor

from syncbn.ops import _extension


def has_operators(device: torch.device) -> bool:
    """Whether operators of csrc run on the device; :mod:`syncbn.ops.fallback` runs on all."""
    return device.type in _extension.device_types


# Dimensions from the fastest to the slowest, where the channel is the fastest.
_CHANNELS_LAST = {
    4: (torch.channels_last, (1, 3, 2, 0)),
    5: (torch.channels_last_3d, (1, 4, 3, 2, 0)),
}


def as_dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return ``tensor`` in the memory format that torch's batch norm gives its output for ``like``.

    That is contiguous, or channels-last where the strides of a 4-D or 5-D tensor say so, with gaps
    between its values or without. ``like`` is ``tensor`` itself if it is not given.
    """
    like = tensor if like is None else like
    if like.is_contiguous():
        return tensor if tensor.is_contiguous() else tensor.contiguous()
    if tensor.dim() != like.dim():
        return tensor  # the operator refuses it
    return tensor.contiguous(memory_format=_memory_format(like))


def _memory_format(tensor: Tensor) -> torch.memory_format:
    if tensor.dim() not in _CHANNELS_LAST:
        return torch.contiguous_format
    channels_last, order = _CHANNELS_LAST[tensor.dim()]
    if tensor.is_contiguous(memory_format=channels_last):  # with any strides of a size of one
        return channels_last
    least = 0
    for dim in order:
        size, stride = tensor.size(dim), tensor.stride(dim)
        # An expanded dimension has no place in the order; the batch alone does not make one.
        if stride == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return torch.contiguous_format
        least = stride * size if size > 1 else stride
    return channels_last


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return values [C] in a shape to be combined with a tensor (N, C, ...)."""
    return values.view((1, -1) + (1,) * (like.dim() - 2))


def compute_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype that the values of an input are computed in."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``, but do not trace one that would return ``tensor`` itself.

    torch 2.11 loses the gradient of an output that such a call has returned: backward gets zeros.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
