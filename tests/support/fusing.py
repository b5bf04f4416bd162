"""A batch norm, a residual and an activation as separate modules of torch's, to compare with."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases import make_input, make_vector
from syncbn import SyncBatchNorm

ACTIVATIONS = {
    None: lambda z: z,
    "relu": F.relu,
    "leaky_relu": lambda z: F.leaky_relu(z, SLOPE),
    "silu": F.silu,
}
SLOPE = 0.25  # of leaky ReLU
FUSED = [(a, r) for a in ACTIVATIONS for r in (False, True) if a is not None or r]
NAMES = ["output", "grad_input", "grad_weight", "grad_bias", "grad_residual"]


class Operands(NamedTuple):
    """The tensors of a pass; the residual may be missing."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor | None

    def as_leaves(self, dtype: torch.dtype | None = None) -> "Operands":
        """Copies that take gradients, in ``dtype`` or each in its own."""
        copies = (None if t is None else t.detach().to(dtype or t.dtype).clone() for t in self)
        x, dy, *others = copies
        return Operands(x, dy, *others)._replace(
            x=x.requires_grad_(),
            weight=others[0].requires_grad_(),
            bias=others[1].requires_grad_(),
            residual=None if others[2] is None else others[2].requires_grad_(),
        )

    def gradients(self) -> list[Tensor]:
        return [t.grad for t in (self.x, self.weight, self.bias, self.residual) if t is not None]


def make_operands(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, *, with_residual: bool
) -> Operands:
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Operands(
        make_input(shape, layout, dtype, mean=1.0),
        make_input(shape, layout, dtype, mean=0.1, std=1.0, seed=1),
        make_vector(shape[1], parameter_dtype, seed=2),
        make_vector(shape[1], parameter_dtype, seed=3),
        make_input(shape, layout, dtype, mean=0.0, std=1.0, seed=4) if with_residual else None,
    )


def make_layer(operands: Operands, activation: str | None) -> SyncBatchNorm:
    """The layer with the operands' parameters."""
    layer = SyncBatchNorm(
        operands.x.size(1),
        dtype=operands.weight.dtype,
        activation=activation,
        negative_slope=SLOPE,
    )
    layer.weight, layer.bias = nn.Parameter(operands.weight), nn.Parameter(operands.bias)
    return layer


def run_separately(operands: Operands, activation: str | None) -> list[Tensor]:
    """Torch's modules one after the other: the output and all gradients."""
    bn = nn.BatchNorm2d(operands.x.size(1)).to(operands.weight.dtype)
    bn._check_input_dim = lambda input: None
    bn.weight, bn.bias = nn.Parameter(operands.weight), nn.Parameter(operands.bias)
    z = bn(operands.x)
    y = ACTIVATIONS[activation](z if operands.residual is None else z + operands.residual)
    y.backward(operands.dy)
    gradients = [operands.x.grad, bn.weight.grad, bn.bias.grad]
    if operands.residual is not None:
        gradients.append(operands.residual.grad)
    return [y.detach(), *gradients]


def sum_errors(x: Tensor) -> dict[str, Tensor] | None:
    """Return bounds of errors in CUDA's sums over a batch; None on the CPU, which sums in float64.

    Within a thread and a block they are of float32, while torch's may be exact by chance. The sum
    of n terms of random signs is about the root of n: 16 roundings of that, in a cascade of partial
    sums.
    """
    if x.dtype == torch.float64 or not x.is_cuda:
        return None
    values = torch.tensor(x.numel() / x.size(1))
    error = 8 * torch.finfo(torch.float32).eps * values.sqrt()
    return {"grad_weight": error, "grad_bias": error}


def assert_error_at_most_twice(
    ours: list[Tensor],
    theirs: list[Tensor],
    exact: list[Tensor],
    sums: dict[str, Tensor] | None = None,
    roundings: int = 2,
) -> None:
    """Compare results, which are of ``NAMES``, with torch's.

    Twice torch's error, because either is a maximum over a sample of roundings. And where torch is
    exact by chance, so many ``roundings`` of the largest value. ``sums`` are bounds of the errors
    in sums of channels, where torch adds up in another dtype.
    """
    values = exact[0].numel() / exact[0].size(1)
    for name, right, their, our in zip(NAMES, exact, theirs, ours, strict=False):
        assert our.dtype == their.dtype and our.shape == their.shape
        error, torchs = (our.double() - right).abs().max(), (their.double() - right).abs().max()
        eps, is_sum = torch.finfo(our.dtype).eps, name in ("grad_weight", "grad_bias")
        # A gradient that is a sum of many terms: of random signs, one rounding of it.
        largest = values**0.5 if is_sum else right.abs().max()
        if exact[0].dtype == theirs[0].dtype:
            # Torch's is the reference: 16 roundings, of the magnitudes
            torchs = 8 * eps * (values if is_sum else largest)
        bound = roundings * eps / 2 * largest
        if is_sum and sums is not None:
            bound = bound + sums[name].max()
        assert error <= max(2 * torchs, bound), (name, error, torchs, bound)
