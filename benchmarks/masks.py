"""Compares layers with and without masks: ``OMP_NUM_THREADS=1 python -m benchmarks.masks``.

``filled`` is the path of devices whose operators take no mask: torch's operators fill masked
positions before sums and clear them in outputs. Half of the positions are masked: at the end of
each sample (padding), or at random (any).
"""

import statistics
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

import syncbn
from benchmarks.timer import host_clock, interleave
from syncbn.ops import batch_norm

SHAPES: dict[str, tuple[int, ...]] = {
    "memory": (16, 64, 112, 112),
    "cache": (8, 128, 28, 28),
    "sequences": (32, 256, 400),
}
TINY: dict[str, tuple[int, ...]] = {"tiny": (2, 3, 4)}


def masks(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the masks of an input of this shape."""
    positions = (shape[0], *shape[2:])
    last = torch.arange(positions[-1]).expand(positions)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand((shape[0], *(1,) * (len(shape) - 2)), generator=generator) * shape[-1]
    return {"padding": last < lengths, "any": torch.rand(positions, generator=generator) < 0.5}


def measure(shape: tuple[int, ...], dtype: torch.dtype, *, channels_last: bool) -> dict[str, str]:
    """Return each mask's time of a training step relative to no mask: median [quartiles]."""
    x, dy = torch.randn(2, *shape).to(dtype)
    if channels_last:
        x, dy = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, dy))
    x.requires_grad_()
    layer = syncbn.SyncBatchNorm(shape[1])

    def step(mask: Tensor | None) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(x, mask=mask), [x, *layer.parameters()], dy)

    def filled(mask: Tensor) -> Callable[[], object]:
        def run() -> object:
            with mock.patch.object(batch_norm, "_takes_mask", lambda mask: False):
                return step(mask)()

        return run

    calls = {"none": step(None)}
    for name, mask in masks(shape).items():
        calls[name], calls[f"{name}, filled"] = step(mask), filled(mask)
    samples = interleave(calls, dict.fromkeys(calls, host_clock), 15, 0.05)
    without = samples.pop("none")
    quartiles = {
        name: statistics.quantiles([a / b for a, b in zip(times, without, strict=True)], n=4)
        for name, times in samples.items()
    }
    return {name: f"{q[1]:.2f} [{q[0]:.2f}, {q[2]:.2f}]" for name, q in quartiles.items()}


def main(shapes: dict[str, tuple[int, ...]]) -> None:
    """Print a line for each case."""
    threads = torch.get_num_threads()
    for name, shape in shapes.items():
        for dtype in (torch.float32, torch.bfloat16):
            for channels_last in (False, True) if len(shape) == 4 else (False,):
                layout = " channels-last" if channels_last else ""
                ratios = measure(shape, dtype, channels_last=channels_last)
                text = "; ".join(f"{mask} {ratio}" for mask, ratio in ratios.items())
                print(f"{name} {shape} {str(dtype)[6:]}{layout}, {threads} threads: {text}")


if __name__ == "__main__":
    main(TINY if "--tiny" in sys.argv else SHAPES)
