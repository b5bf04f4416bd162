"""Errors of our layer and torch's, compared with the same formulas in NumPy's longest float.

The longest float has 80 bits on x86-64. Where it is float64, errors of float64 inputs are
meaningless.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.cases import DTYPES, LAYOUTS, Case, Suite
from benchmarks.layer import Setting, make_layers
from benchmarks.results import Row, spread

EPS, MOMENTUM = 1e-5, 0.1  # the layers' defaults
QUANTITIES = ("output", "grad_input", "grad_weight", "running_var")

Wide = npt.NDArray[np.longdouble]


def accuracy_rows(suite: Suite, device: torch.device) -> Iterator[Row]:
    """Measure each quantity's largest error, as a fraction of its largest exact value."""
    setting = Setting(suite, device, torch.get_num_threads(), "default")
    for shape in suite.accuracy_shapes:
        for dtype in DTYPES:
            for ratio in suite.ratios:
                # At larger ratios the dtype's rounding exceeds the spread of the values.
                if ratio < 1 / torch.finfo(DTYPES[dtype]).eps:
                    case = Case(f"mean/std {ratio:.0e}", shape, dtype, LAYOUTS[0])
                    yield from _rows(case, ratio, setting)


def _rows(case: Case, ratio: float, setting: Setting) -> Iterator[Row]:
    errors: dict[tuple[str, str], list[float]] = {}
    for seed in range(setting.suite.seeds):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn((2, *case.shape), generator=generator, dtype=torch.float64)
        x, dy = (v.to(DTYPES[case.dtype]) for v in (values[0] + ratio, values[1]))
        weight = 0.5 + torch.rand(case.shape[1], generator=generator)
        exact = _exact(x, dy, weight)
        layers = make_layers(case, setting)
        for variant in ("syncbn", "torch"):
            results = _train(layers[variant], x.to(setting.device), dy.to(setting.device), weight)
            for quantity, result, right in zip(QUANTITIES, results, exact, strict=True):
                error = np.abs(_wide(result) - right).max() / np.abs(right).max()
                errors.setdefault((quantity, variant), []).append(float(error))
    for (quantity, variant), found in errors.items():
        row = (*case.columns, setting.threads, setting.allocator, quantity, variant, "measured")
        yield Row("accuracy", *row, *spread(found), "relative error", len(found))


def _train(layer: nn.Module, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    parameter = layer.get_parameter("weight")
    with torch.no_grad():
        parameter.copy_(weight)
    x.requires_grad_()
    output = layer(x)
    gradients = torch.autograd.grad(output, [x, parameter], dy)
    return output.detach(), *gradients, layer.get_buffer("running_var")


def _wide(tensor: Tensor) -> Wide:
    # float64 holds every value of the smaller dtypes.
    return tensor.detach().double().cpu().numpy().astype(np.longdouble)


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
