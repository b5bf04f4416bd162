"""The epilogue of a normalization: the addition of a residual, then an activation."""

import math
from typing import NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from syncbn import _compat
from syncbn.ops.arguments import Arguments, is_number

# The operators' numbers of activations, as in csrc/common/activations.h.
NUMBERS = {None: 0, "relu": 1, "leaky_relu": 2, "silu": 3}
# Their derivatives follow from the sign of the output; those of others take the input.
FROM_OUTPUT = ("relu", "leaky_relu")


def check_activation(activation: object) -> None:
    """Raise ValueError unless this is None or an activation that can be fused."""
    if not (activation is None or isinstance(activation, str)) or activation not in NUMBERS:
        raise unknown_activation(activation)


def unknown_activation(activation: object) -> ValueError:
    """Return the error of an activation that cannot be fused."""
    names = ", ".join(map(repr, NUMBERS))
    return ValueError(f"expected activation to be one of {names}, but got {activation!r}")


def check_negative_slope(negative_slope: object) -> None:
    """Raise TypeError unless this is a number, ValueError unless it is finite and not negative."""
    if type(negative_slope) is not float and not is_number(negative_slope):
        raise TypeError(
            f"expected negative_slope to be a number, but got {type(negative_slope).__name__}"
        )
    if not 0 <= float(negative_slope) < math.inf:
        raise ValueError(
            f"expected negative_slope to be finite and not negative, but got {negative_slope}"
        )


def apply_epilogue(output: Tensor, arguments: Arguments) -> Tensor:
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
    # TorchScript can read neither NUMBERS nor the error of check_activation.
    raise ValueError(f"expected None, 'relu', 'leaky_relu' or 'silu', but got {activation}")


def add_residual(output: Tensor, residual: Tensor | None) -> Tensor:
    """Return the sum; without a residual, ``output``."""
    return output if residual is None else output + residual


# torch.fx makes a placeholder of the residual where it traces a layer as the root; the value of the
# placeholder may be None.
torch.fx.wrap("add_residual")


def of_module(module: nn.Module) -> tuple[str, float] | None:
    """Return the activation and the slope that the module applies; None if the operators cannot."""
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
    """Return the arguments that are not the default, for the text of a layer."""
    text = "" if activation is None else f", activation={activation!r}"
    return text if negative_slope == 0.01 else f"{text}, negative_slope={negative_slope}"


class EpilogueGradient(NamedTuple):
    """The activation of a pass, and the tensors that its derivative is computed from."""

    activation: str
    negative_slope: float
    # The constants of syncbn.ops.batch_norm.batch_norm_apply; None where ``output`` is given.
    constants: Tensor | None
    # The residual, where the derivative does not follow from the output.
    residual: Tensor | None
    # The output after a residual, where it does.
    output: Tensor | None
    # The bias, for higher derivatives of SiLU.
    bias: Tensor | None

    def is_stored(self, input: Tensor) -> bool:
        """Whether dz is stored: as the gradient of a residual, and for SiLU on CPUs.

        On CPUs storing dz takes less time than computing it again from grad_output and input.
        """
        has_residual = self.residual is not None or self.output is not None
        return has_residual or (self.activation not in FROM_OUTPUT and input.is_cpu)

    def for_operators(self) -> tuple[Tensor | None, int, float]:
        """Return constants, activation and slope as the operators take them."""
        return self.constants, NUMBERS[self.activation], float(self.negative_slope)
