"""What a device can do: whether it has operators of ours, and whether it has float64."""

import torch

from syncbn import _extension, _torch_private

__all__ = ["has_float64", "has_operators", "of_statistics", "widest"]

# By torch's definition. Not tried: a graph of CUDA that is being captured refuses to be waited for.
_HAVE_FLOAT64 = ("cpu", "cuda", "meta")

_found: dict[torch.device, bool] = {}


def has_operators(device: torch.device) -> bool:
    """Whether operators of csrc run on the device; those of :mod:`syncbn.plain` run on all."""
    return device.type in _extension.device_types


@_torch_private.constant_in_graphs
def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64, which is tried once: devices of one type differ."""
    if device.type in _HAVE_FLOAT64:
        return True
    if device not in _found:
        _found[device] = _try_float64(device)
    return _found[device]


def _try_float64(device: torch.device) -> bool:
    """Whether a sum that float32 does not hold survives: some devices take float32 silently."""
    value = 1 + 2.0**-40
    with _torch_private.without_dispatch_modes():
        try:
            one = torch.ones(1, dtype=torch.float64, device=device)
            return (one + 2.0**-40).cpu().item() == value
        except (NotImplementedError, RuntimeError, TypeError):
            return False


def of_statistics(device: torch.device) -> torch.device:
    """Return where float64 statistics of tensors on the device are: there, or on the CPU."""
    return device if has_float64(device) else torch.device("cpu")


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype that the device computes in."""
    return torch.float64 if has_float64(device) else torch.float32
