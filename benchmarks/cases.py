"""Cases for timing CPUs and GPUs, suites of different length, and shapes of nets."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.traffic import RESNET50

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Case:
    """One input of a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    # For a part of a net: the whole net as a case, and the number of such layers in it.
    net: "Case | None" = None
    layers: int = 1

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """The first columns of a row after the benchmark's name."""
        return self.name, self.dtype, self.layout, "x".join(map(str, self.shape))

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def tensor(self, device: torch.device, seed: int = 0) -> Tensor:
        """Return normally distributed values."""
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.randn(self.shape, generator=generator, device=device)
        values = values.to(DTYPES[self.dtype])
        if self.layout == "channels_last":
            values = values.contiguous(memory_format=torch.channels_last)
        elif self.layout != "contiguous":
            raise ValueError(f"expected contiguous or channels_last, but got {self.layout!r}")
        return values


@dataclass(frozen=True)
class Suite:
    """The cases and lengths of one run."""

    cases: tuple[Case, ...]
    fused: tuple[Case, ...]  # the cases also measured with an activation
    repeats: int  # samples of each variant
    sample_seconds: float  # the least for each sample
    worlds: tuple[int, ...]  # world sizes for counting collectives
    accuracy_shapes: tuple[tuple[int, ...], ...]
    ratios: tuple[float, ...]  # mean / standard deviation
    seeds: int  # inputs for measuring errors
    shapes_per_net: int  # for the sweep on a CPU


def grid(name: str, shape: tuple[int, ...], *dtypes: str) -> list[Case]:
    """Return the cases of a shape, in each layout."""
    layouts = LAYOUTS if len(shape) == 4 else LAYOUTS[:1]
    return [Case(name, shape, dtype, layout) for dtype in dtypes for layout in layouts]


def _net(
    name: str, shape: tuple[int, ...], parts: tuple[tuple[int, int, int], ...], *kind: str
) -> list[Case]:
    """Return the layers of a net for images of ``shape``; ``kind`` is dtype and layout."""
    dtype, layout = kind
    net = Case(name, shape, dtype, layout)
    return [
        Case(name, (shape[0], channels, size, size), dtype, layout, net, layers)
        for layers, channels, size in parts
    ]


def resnet50(images: int, *kind: str) -> list[Case]:
    """Return the layers of ResNet-50, each shape once; ``kind`` is dtype and layout."""
    return _net(f"ResNet-50 x{images}", (images, 3, 224, 224), RESNET50, *kind)


# Sizes are of one tensor in float32. `memory` exceeds the caches and is bound by memory; `cache`
# fits the last-level cache; the small cases are bound by latency and the host.
_ALL = (
    *grid("memory", (16, 64, 112, 112), *DTYPES),  # 51 MB
    *grid("memory wide", (32, 256, 56, 56), "float32", "bfloat16"),  # 103 MB
    *grid("cache", (8, 128, 28, 28), *DTYPES),  # 3.2 MB
    *grid("cache narrow", (32, 16, 56, 56), "float32", "bfloat16"),  # 6.4 MB
    *grid("maps 7x7", (8, 512, 7, 7), "float32", "bfloat16"),  # 0.8 MB
    *grid("2-D", (256, 2048), "float32", "bfloat16"),  # 2.1 MB
)
_FUSED = tuple(
    case for case in _ALL if case.name == "memory" and case.dtype in ("float32", "bfloat16")
)
_QUICK = tuple(
    case
    for case in _ALL
    if case.name in ("memory", "cache", "2-D")
    and (case.dtype, case.layout) in (("float32", "contiguous"), ("bfloat16", "channels_last"))
)

SUITES = {
    "full": Suite(
        cases=_ALL,
        fused=_FUSED,
        repeats=21,
        sample_seconds=0.02,
        worlds=(1, 2, 3, 4, 5, 6, 7, 8),
        accuracy_shapes=((4, 16, 7, 7), (8, 128, 28, 28), (256, 2048)),
        ratios=(1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6),
        seeds=3,
        shapes_per_net=7,
    ),
    "quick": Suite(
        cases=_QUICK,
        fused=tuple(case for case in _QUICK if case in _FUSED),
        repeats=9,
        sample_seconds=0.01,
        worlds=(1, 2, 4),
        accuracy_shapes=((4, 16, 7, 7),),
        ratios=(1, 1e3, 1e6),
        seeds=1,
        shapes_per_net=2,
    ),
    # A smoke test: its times are meaningless.
    "tiny": Suite(
        cases=(
            *grid("tiny", (2, 3, 5, 7), "float32"),
            *grid("tiny 2-D", (4, 5), "bfloat16"),
        ),
        fused=tuple(grid("tiny", (2, 3, 5, 7), "float32")),
        repeats=3,
        sample_seconds=0.0001,
        worlds=(1, 2, 3),
        accuracy_shapes=((2, 3, 5, 7),),
        ratios=(1, 1e3),
        seeds=2,
        shapes_per_net=1,
    ),
}

# In addition to ResNet-50: small maps, which are bound by latency, and an odd number of channels,
# for which channels-last tensors have no wide vectors and torch's kernels have few blocks.
_GPU_DTYPES = ("float32", "bfloat16", "float16")
_GPU_SMALL = (
    *grid("maps 7x7", (8, 512, 7, 7), *_GPU_DTYPES),
    *grid("2-D", (256, 2048), *_GPU_DTYPES),
    *grid("17 channels", (32, 17, 112, 112), *_GPU_DTYPES),
)

# These cover split planes, small maps in 16 bits, and tiles of channels-last tensors.
_GPU_QUICK = (
    ("float32", "contiguous"),
    ("float32", "channels_last"),
    ("bfloat16", "contiguous"),
    ("bfloat16", "channels_last"),
)

# The largest tensors of ResNet-50, for 256 images.
_GPU_FUSED = tuple(
    case for dtype in ("float32", "bfloat16") for case in grid("memory", (256, 256, 56, 56), dtype)
)

# Accuracy is measured as on CPUs.
CUDA_SUITES = {
    "full": replace(
        SUITES["full"],
        cases=(
            *(
                case
                for images in (32, 256)
                for dtype in _GPU_DTYPES
                for layout in LAYOUTS
                for case in resnet50(images, dtype, layout)
            ),
            *_GPU_SMALL,
        ),
        fused=_GPU_FUSED,
        sample_seconds=0.004,
        worlds=(2, 4, 8),
    ),
    "quick": replace(
        SUITES["quick"],
        cases=(
            *(
                case
                for images in (32, 256)
                for kind in _GPU_QUICK
                for case in resnet50(images, *kind)
            ),
            *(case for case in _GPU_SMALL if case.dtype != "float16"),
        ),
        fused=_GPU_FUSED,
        sample_seconds=0.002,
        worlds=(2, 4, 8),
    ),
    "tiny": replace(
        SUITES["tiny"],
        cases=(
            *_net("tiny net", (2, 3, 9, 9), ((1, 4, 9), (3, 5, 4)), "float32", "contiguous"),
            *grid("tiny 2-D", (4, 5), "bfloat16"),
        ),
        worlds=(1, 2),
    ),
}

_IMAGE_NETS = ("resnet50", "mobilenet_v3_large", "efficientnet_b0", "densenet121")
_NETS: dict[str, set[tuple[int, ...]]] = {
    "DCGAN": {(64, 1024 >> level, 2 << level, 2 << level) for level in range(1, 5)},
    "PointNet": {(16, 64, 1024), (16, 128, 1024), (16, 1024, 1024), (16, 512), (16, 256)},
    "heads": {(256, 128), (256, 2048), (1024, 4096)},
}


def shapes_of_nets(number: int) -> dict[str, list[tuple[int, ...]]]:
    """Return ``number`` different shapes of each net, from its smallest to its largest.

    The image nets are torchvision's, for batches of 8 and 32 images of 224x224. The generator of a
    DCGAN makes 64 images of 64x64, and a PointNet takes 16 clouds of 1024 points. ``heads`` are the
    projection heads of contrastive learning.
    """
    nets = {name: _shapes_of_images(name) for name in _IMAGE_NETS} | _NETS
    return {name: _spread(shapes, number) for name, shapes in nets.items()}


def _shapes_of_images(name: str) -> set[tuple[int, ...]]:
    """Return the input shapes of a torchvision net's batch norm layers."""
    from torchvision import models  # may be missing on a machine with a GPU

    shapes = set()
    with torch.device("meta"):  # shapes without values
        net = models.get_model(name)
        for module in net.modules():
            if isinstance(module, _BatchNorm):
                module.register_forward_pre_hook(lambda _, args: shapes.add(tuple(args[0].shape)))
        for images in (8, 32):
            net(torch.empty(images, 3, 224, 224))
    return shapes


def _spread(shapes: set[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
    """Return at most ``number`` shapes at equal distances in the order of their sizes."""
    by_size = sorted(shapes, key=lambda shape: (math.prod(shape), shape))
    if number >= len(by_size):
        return by_size
    return [by_size[round(i * (len(by_size) - 1) / max(1, number - 1))] for i in range(number)]
