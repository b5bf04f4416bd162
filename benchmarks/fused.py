"""Times of a layer with what follows it in its own passes, against the same as modules.

``separate`` is our layer, an addition in place and torch's activation in place, as nets have them;
``torch`` is the same behind torch's layer. The activation costs a fused layer no pass over memory,
an addition one forward and two backward.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

import syncbn
from benchmarks.cases import Case
from benchmarks.layer import (
    LAYER_PASSES,
    Setting,
    copy_call,
    make_buffers,
    parameter_dtype,
    time_variants,
    timed_rows,
    torch_layer,
)
from benchmarks.rows import Row
from benchmarks.timer import Call

QUANTITY = "forward+backward"
# Passes over memory that an addition costs: one is read forward, one read and one written backward.
ADDITION_PASSES = 3

ACTIVATIONS = {
    "relu": ("ReLU", nn.ReLU),
    "leaky_relu": ("LeakyReLU", nn.LeakyReLU),
    "silu": ("SiLU", nn.SiLU),
}


class Separate(nn.Module):
    """A normalization, an addition and an activation, one after the other."""

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


def fused_rows(case: Case, setting: Setting) -> Iterator[Row]:
    """Time forward with backward of each activation, with and without an addition before it."""
    for activation, (name, _) in ACTIVATIONS.items():
        for has_residual in (False, True):
            named = replace(case, name=f"{case.name}{' + addition' * has_residual} + {name}")
            yield from _rows(named, activation, has_residual, setting)


def _rows(case: Case, activation: str, has_residual: bool, setting: Setting) -> Iterator[Row]:
    turns = make_buffers(case, setting.device)
    residual = case.tensor(setting.device, seed=2).requires_grad_() if has_residual else None

    def step_call(layer: nn.Module) -> Call:
        parameters = list(layer.parameters())

        def step() -> tuple[Tensor, ...]:
            buffers = next(turns)
            inputs = [buffers.leaf] if residual is None else [buffers.leaf, residual]
            return torch.autograd.grad(layer(*inputs), [*inputs, *parameters], buffers.dy)

        return step

    layers = _layers(case, activation, setting.device)
    variants = {name: step_call(layer) for name, layer in layers.items()}
    samples = time_variants({**variants, "copy": copy_call(turns)}, setting)
    passes = LAYER_PASSES[QUANTITY] + ADDITION_PASSES * has_residual
    samples["copy"] = [passes / 2 * seconds for seconds in samples["copy"]]
    pairs = [("separate", "syncbn"), ("copy", "syncbn"), ("copy", "torch")]
    yield from timed_rows("fused", case, QUANTITY, samples, setting, pairs)


def _layers(case: Case, activation: str, device: torch.device) -> dict[str, nn.Module]:
    channels, dtype = case.shape[1], parameter_dtype(case)
    module = ACTIVATIONS[activation][1]

    def ours(**options: str) -> nn.Module:
        return syncbn.SyncBatchNorm(channels, device=device, dtype=dtype, **options)  # type: ignore[arg-type]

    return {
        "syncbn": ours(activation=activation),
        "separate": Separate(ours(), module(inplace=True)),
        "torch": Separate(torch_layer(case, device), module(inplace=True)),
        "syncbn again": ours(activation=activation),
    }
