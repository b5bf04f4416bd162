"""Errors of our layer and torch's, compared with the same formulas in NumPy's longest float.

The longest float has 80 bits on x86-64. Where it is float64, errors of float64 inputs are
meaningless.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import syncbn
from benchmarks.cases import DTYPES, LAYOUTS, Suite
from benchmarks.rows import Row, spread

EPS = 1e-5
MOMENTUM = 0.1
QUANTITIES = ("output", "grad_input", "grad_weight", "running_var")

Wide = npt.NDArray[np.longdouble]


def accuracy_rows(suite: Suite, device: torch.device) -> Iterator[Row]:
    """Measure each quantity's largest error, as a fraction of its largest exact value."""
    for shape in suite.accuracy_shapes:
        for dtype in DTYPES:
            for ratio in suite.ratios:
                # At larger ratios the dtype's rounding exceeds the spread of the values.
                if ratio < 1 / torch.finfo(DTYPES[dtype]).eps:
                    yield from _rows(shape, dtype, ratio, suite.seeds, device)


def _rows(
    shape: tuple[int, ...], dtype: str, ratio: float, seeds: int, device: torch.device
) -> Iterator[Row]:
    errors: dict[tuple[str, str], list[float]] = {}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        x, dy = (values[0] + ratio).to(DTYPES[dtype]), values[1].to(DTYPES[dtype])
        weight = (0.5 + torch.rand(shape[1], generator=generator)).to(_parameter_dtype(dtype))
        exact = _exact(x, dy, weight)
        for variant in ("syncbn", "torch"):
            results = _train(variant, x.to(device), dy.to(device), weight.to(device))
            for quantity, result, right in zip(QUANTITIES, results, exact, strict=True):
                error = np.abs(_wide(result) - right).max() / np.abs(right).max()
                errors.setdefault((quantity, variant), []).append(float(error))
    size = "x".join(map(str, shape))
    for (quantity, variant), found in errors.items():
        inputs = (f"mean/std {ratio:.0e}", dtype, LAYOUTS[0], size, torch.get_num_threads())
        yield Row(
            "accuracy",
            *inputs,
            "default",
            quantity,
            variant,
            "measured",
            *spread(found),
            "relative error",
            len(found),
        )


def _parameter_dtype(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


def _train(variant: str, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    layers = {"syncbn": syncbn.SyncBatchNorm, "torch": nn.BatchNorm2d}
    if x.dim() == 2:
        layers["torch"] = nn.BatchNorm1d
    layer = layers[variant](x.size(1), EPS, MOMENTUM, device=x.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    leaf = x.clone().requires_grad_()
    output = layer(leaf)
    grad_input, grad_weight = torch.autograd.grad(output, [leaf, layer.weight], dy)
    running_var = layer.get_buffer("running_var")
    return output.detach(), grad_input, grad_weight, running_var


def _wide(tensor: Tensor) -> Wide:
    # float64 holds every value of the smaller dtypes.
    return tensor.double().cpu().numpy().astype(np.longdouble)


def _exact(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Wide, ...]:
    """Return the four quantities of a training step, by the textbook formulas."""
    wide, grad = _wide(x), _wide(dy)
    axes = tuple(axis for axis in range(x.dim()) if axis != 1)
    scale = _wide(weight).reshape((1, -1) + (1,) * (x.dim() - 2))
    count = x.numel() // x.size(1)
    centered = wide - wide.mean(axes, keepdims=True)
    var = (centered**2).mean(axes, keepdims=True)
    invstd = 1 / np.sqrt(var + np.longdouble(EPS))
    xhat = centered * invstd
    grad_weight = (grad * xhat).sum(axes, keepdims=True)
    grad_mean = grad.mean(axes, keepdims=True)
    grad_input = scale * invstd * (grad - grad_mean - xhat * grad_weight / count)
    unbiased = var.ravel() * count / (count - 1)
    running_var = (1 - np.longdouble(MOMENTUM)) + np.longdouble(MOMENTUM) * unbiased
    return scale * xhat, grad_input, grad_weight.ravel(), running_var
