"""A model of each kind of layer, as tests/data/*.pt hold them: ``python tests/support/pickled.py``.

A file is written once and stays, because later versions have to load it.
"""

from pathlib import Path

import torch
from torch import nn

from syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    freeze_statistics,
    revert_sync_batchnorm,
)

DATA = Path(__file__).parents[1] / "data"


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


KINDS = {make.__name__: make for make in (built, converted, derived, frozen, reverted)}


def write(kind: str, path: Path) -> None:
    """Write a model, an input, and the model's output for it in evaluation after one in training."""
    torch.manual_seed(0)
    model, input = KINDS[kind](), torch.randn(3, 2, 2, 2) + 1
    model(input)
    output = model.eval()(input).detach()
    torch.save({"model": model.train(), "input": input, "output": output}, path)


if __name__ == "__main__":
    for kind in KINDS:
        path = DATA / f"{kind}.pt"
        if not path.exists():
            write(kind, path)
