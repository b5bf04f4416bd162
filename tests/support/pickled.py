"""A model of each kind of layer, as tests/data/*.pt hold them.

A file is written once and stays, because later versions have to load it. In tests:
``python -c "from support import pickled; pickled.write_missing()"``.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    revert_sync_batchnorm,
)

DATA = Path(__file__).parents[1] / "data"
sys.modules["pickled"] = sys.modules[__name__]  # as the files name it


class Doubled(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


def built():
    return nn.Sequential(SyncBatchNorm(2, momentum=None, activation="silu"))


def converted():
    return convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(2)))


def derived():
    return convert_sync_batchnorm(nn.Sequential(Doubled(2)))


def frozen():
    model = converted()
    freeze_statistics(model, affine=True)
    return model


def reverted():
    layer = SyncBatchNorm(2, activation="leaky_relu", negative_slope=0.2)
    return revert_sync_batchnorm(nn.Sequential(layer))


def fused_activation():
    layers = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU())
    return fuse_activations(convert_sync_batchnorm(layers))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        return torch.relu(self.norm(x) + x)


def fused_module():
    return fuse_activations(convert_sync_batchnorm(nn.Sequential(Residual())))


def converted_subclass():  # as derived, in a later format
    return derived()


def fused_code():  # as fused_module, in a later format
    return fused_module()


MAKERS = (
    *(built, converted, derived, frozen, reverted, fused_activation, fused_module),
    *(converted_subclass, fused_code),
)
KINDS = {make.__name__: make for make in MAKERS}


def write(kind: str, path: Path) -> None:
    """Write a model, an input, and the output of the model, which has trained on it once."""
    torch.manual_seed(0)
    model, input = KINDS[kind](), torch.randn(3, 2, 2, 2) + 1
    model(input)
    output = model.eval()(input).detach()
    torch.save({"model": model.train(), "input": input, "output": output}, path)


def write_missing() -> None:
    """Write the files of new kinds."""
    for kind in KINDS:
        path = DATA / f"{kind}.pt"
        if not path.exists():
            write(kind, path)
