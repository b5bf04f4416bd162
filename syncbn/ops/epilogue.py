"""What may follow a normalization: the addition of a residual, and an activation."""

import math
from typing import NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from syncbn import _compat
from syncbn.ops.arguments import Arguments, is_number

__all__ = [
    "NUMBERS",
    "Through",
    "activate",
    "add_residual",
    "check_activation",
    "check_negative_slope",
    "describe",
    "follow",
    "gradient",
    "is_slope",
    "of_module",
]


# As the operators take them: csrc/common/activations.h.
NUMBERS = {None: 0, "relu": 1, "leaky_relu": 2, "silu": 3}


def check_activation(activation: object) -> None:
    """Raise ValueError unless it is one that can be fused, or None."""
    if not (activation is None or isinstance(activation, str)) or activation not in NUMBERS:
        names = ", ".join(map(repr, NUMBERS))
        raise ValueError(f"expected activation to be one of {names}, but got {activation!r}")


def check_negative_slope(negative_slope: object) -> None:
    """Raise TypeError unless it is a number, ValueError unless finite and not negative."""
    if not is_number(negative_slope):
        raise TypeError(
            f"expected negative_slope to be a number, but got {type(negative_slope).__name__}"
        )
    if not 0 <= float(negative_slope) < math.inf:
        raise ValueError(
            f"expected negative_slope to be finite and not negative, but got {negative_slope}"
        )


def follow(output: Tensor, arguments: Arguments) -> Tensor:
    """Add the residual to a normalized input and apply the activation, by torch's own operators."""
    if arguments.residual is not None:
        output = add_residual(output, arguments.residual)
    return activate(output, arguments.activation, arguments.negative_slope)


def activate(output: Tensor, activation: str | None, negative_slope: float) -> Tensor:
    """Apply the activation; TorchScript compiles this for reverted layers."""
    if activation is None:
        return output
    if activation == "relu":
        return F.relu(output)
    if activation == "leaky_relu":
        return F.leaky_relu(output, negative_slope)
    if activation == "silu":
        return F.silu(output)
    # TorchScript knows neither the names above nor their errors.
    raise ValueError(f"expected None, 'relu', 'leaky_relu' or 'silu', but got {activation}")


def add_residual(output: Tensor, residual: Tensor | None) -> Tensor:
    """Return their sum, or ``output``."""
    return output if residual is None else output + residual


# Symbolic tracing of a layer by itself makes a placeholder of its residual, which may stay None.
torch.fx.wrap("add_residual")


def of_module(module: nn.Module) -> tuple[str, float] | None:
    """Return the activation and the slope that do what the module does; None if none does."""
    if not _compat.does_as_its_class(module):
        return None
    if type(module) is nn.ReLU:
        return "relu", 0.01
    if type(module) is nn.SiLU:
        return "silu", 0.01
    if type(module) is nn.LeakyReLU and is_slope(module.negative_slope):
        return "leaky_relu", module.negative_slope
    return None


def is_slope(number: object) -> bool:
    """Whether the number is a slope that the operators take."""
    return isinstance(number, (int, float)) and 0 <= number < math.inf


def describe(activation: str | None, negative_slope: float) -> str:
    """Return the arguments of a layer that are not the default, for its text."""
    text = "" if activation is None else f", activation={activation!r}"
    return text if negative_slope == 0.01 else f"{text}, negative_slope={negative_slope}"


class Through(NamedTuple):
    """An activation that a gradient goes through, and what its derivative is computed from.

    Those are the ``constants`` of :func:`syncbn.ops.batch_norm.batch_norm_apply` and, for SiLU, the
    ``residual``; with a residual and ReLU or leaky ReLU they are the ``output``. ``bias`` is there
    for higher derivatives of SiLU.
    """

    activation: str
    negative_slope: float
    constants: Tensor | None
    residual: Tensor | None
    output: Tensor | None
    bias: Tensor | None

    def is_stored(self, input: Tensor) -> bool:
        """Whether dz is computed once: as the gradient of a residual, and for SiLU on CPUs.

        There storing it takes less time than computing it again from grad_output and input.
        """
        has_residual = self.residual is not None or self.output is not None
        return has_residual or (self.activation == "silu" and input.is_cpu)

    def for_operators(self) -> tuple[Tensor | None, int, float]:
        """Return constants, activation and slope as the operators take them."""
        return self.constants, NUMBERS[self.activation], float(self.negative_slope)


def gradient(grad_output: Tensor, z: Tensor, activation: str, negative_slope: float) -> Tensor:
    """Return ``grad_output`` times the derivative at ``z``, as a differentiable expression.

    For ReLU and leaky ReLU ``z`` may as well be the output, which has its sign.
    """
    if activation == "relu":
        return torch.where(z <= 0, 0.0, grad_output)
    if activation == "leaky_relu":
        return torch.where(z > 0, grad_output, grad_output * negative_slope)
    sigmoid = torch.sigmoid(z)
    return grad_output * (sigmoid * (1 + z * (1 - sigmoid)))
