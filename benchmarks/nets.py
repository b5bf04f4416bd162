"""Input shapes of the batch norm layers of some nets."""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision import models

Shape = tuple[int, ...]

_IMAGE_NETS = ("resnet50", "mobilenet_v3_large", "efficientnet_b0", "densenet121")
_BATCHES = (8, 32)

_DCGAN = tuple((64, 1024 >> level, 2 << level, 2 << level) for level in range(1, 5))
_POINTNET = (*((16, channels, 1024) for channels in (64, 128, 1024)), (16, 512), (16, 256))
_HEADS = ((256, 128), (256, 2048), (1024, 4096))


def shapes_of_nets(number: int) -> dict[str, tuple[Shape, ...]]:
    """Return ``number`` different shapes of each net, from its smallest to its largest.

    The image nets are torchvision's, for batches of 8 and 32 images of 224x224. The generator of a
    DCGAN makes 64 images of 64x64, and a PointNet takes 16 clouds of 1024 points. ``heads`` are the
    projection heads of contrastive learning.
    """
    nets = {name: _shapes_of_images(name) for name in _IMAGE_NETS}
    nets |= {"DCGAN": set(_DCGAN), "PointNet": set(_POINTNET), "heads": set(_HEADS)}
    return {name: _spread(shapes, number) for name, shapes in nets.items()}


def _shapes_of_images(name: str) -> set[Shape]:
    with torch.device("meta"):  # shapes without values
        net = models.get_model(name)
        return {
            shape
            for images in _BATCHES
            for shape in _inputs_of_batch_norms(net, torch.empty(images, 3, 224, 224))
        }


def _inputs_of_batch_norms(net: nn.Module, images: Tensor) -> set[Shape]:
    shapes: set[Shape] = set()

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shapes.add(tuple(inputs[0].shape))

    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    net(images)
    for handle in handles:
        handle.remove()
    return shapes


def _spread(shapes: set[Shape], number: int) -> tuple[Shape, ...]:
    by_size = sorted(shapes, key=lambda shape: (math.prod(shape), shape))
    if number == 1:
        return (by_size[0],)
    if number >= len(by_size):
        return tuple(by_size)
    last = len(by_size) - 1
    return tuple(by_size[round(i * last / (number - 1))] for i in range(number))
