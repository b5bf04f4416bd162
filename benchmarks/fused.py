"""A layer with a fused epilogue, compared with separate modules.

``separate`` is our layer, an addition in place and torch's activation in place, as nets have them;
``torch`` is the same behind torch's layer. An activation costs a fused layer no pass over memory.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import syncbn
from benchmarks.cases import Case
from benchmarks.layer import LAYER_PASSES, Buffers, Setting, parameter_dtype, timed_rows
from benchmarks.rows import Row
from benchmarks.timer import Call

QUANTITY = "forward+backward"
# One read forward, one read and one write backward.
ADDITION_PASSES = 3

ACTIVATIONS = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "silu": nn.SiLU}


class FusedCase(NamedTuple):
    """A case with its epilogue."""

    case: Case  # its name includes the epilogue
    activation: str
    residual: Tensor | None


class Separate(nn.Module):
    """A normalization, an addition and an activation as separate modules."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(norm(x) + residual)``."""
        z = self.norm(x)
        if residual is not None:
            z += residual
        output: Tensor = self.activation(z)
        return output


def fused_cases(case: Case, device: torch.device) -> Iterator[FusedCase]:
    """Yield the case with each activation, with and without an addition before it."""
    for activation, module in ACTIVATIONS.items():
        for addition in ("", " + addition"):
            residual = case.tensor(device, seed=2).requires_grad_() if addition else None
            named = replace(case, name=f"{case.name}{addition} + {module.__name__}")
            yield FusedCase(named, activation, residual)


def fused_calls(fused: FusedCase, theirs: nn.Module, turns: Iterator[Buffers]) -> dict[str, Call]:
    """Return a training step of each variant; ``theirs`` is torch's layer."""
    case, activation, residual = fused
    options: dict[str, Any] = {"device": next(turns).x.device, "dtype": parameter_dtype(case)}

    def ours(activation: str | None) -> nn.Module:
        return syncbn.SyncBatchNorm(case.shape[1], activation=activation, **options)

    def step_call(layer: nn.Module) -> Call:
        parameters = list(layer.parameters())

        def step() -> tuple[Tensor, ...]:
            buffers = next(turns)
            inputs = [buffers.leaf] if residual is None else [buffers.leaf, residual]
            return torch.autograd.grad(layer(*inputs), [*inputs, *parameters], buffers.dy)

        return step

    module = ACTIVATIONS[activation]
    layers = {
        "syncbn": ours(activation),
        "separate": Separate(ours(None), module(inplace=True)),
        "torch": Separate(theirs, module(inplace=True)),
        "syncbn again": ours(activation),
    }
    return {name: step_call(layer) for name, layer in layers.items()}


def timed_fused_rows(
    fused: FusedCase, samples: dict[str, list[float]], setting: Setting
) -> Iterator[Row]:
    """Yield the rows of a case; the sample ``copy`` is of one tensor."""
    passes = LAYER_PASSES[QUANTITY] + (0 if fused.residual is None else ADDITION_PASSES)
    copy = [passes / 2 * seconds for seconds in samples["copy"]]
    pairs = [("separate", "syncbn"), ("copy", "syncbn"), ("copy", "torch")]
    yield from timed_rows("fused", fused.case, QUANTITY, {**samples, "copy": copy}, setting, pairs)
