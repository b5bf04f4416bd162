"""Tensors of the stand-in's device."""

import torch

DEVICE = "cuda"


def sequence(*shape, dtype=torch.float32):
    """Values that are no multiples of each other, on the device."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float64).sin() * 3).reshape(shape).to(DEVICE, dtype)
