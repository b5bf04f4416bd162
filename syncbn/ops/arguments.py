"""The arguments of a pass besides its input and its group."""

import contextlib
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple, SupportsFloat, TypeGuard

import torch
from torch import Tensor


class Arguments(NamedTuple):
    """Vectors [C], numbers, mask and epilogue of a layer or of a call of the function.

    A ``momentum`` of None is the cumulative average and needs ``num_batches_tracked``, which grows
    by one in training. ``num_features`` is the C that a layer was made for. ``residual``, of the
    input's shape and dtype, is added to the normalized input, then comes the ``activation``, a key
    of :data:`syncbn.ops.epilogue.NUMBERS`. ``dims`` are the numbers of dimensions that a layer
    takes; None for two or more. ``mask`` is false at positions that do not count: as it was given
    or, after the checks, as :func:`syncbn.ops.masks.as_positions` returns it.
    """

    # The order is of use: [2:5] is written, the first operator of a pass checks [:6], [:7] are
    # operands of the normalization, and [5:11] are no tensors.
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float
    num_features: int | None = None
    activation: str | None = None
    negative_slope: float = 0.01
    dims: Sequence[int] | None = None
    residual: Tensor | None = None
    mask: Tensor | None = None

    @property
    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Weight, bias, running_mean and running_var."""
        return self[:4]

    def for_checks(self) -> tuple[Any, ...]:
        """Return the arguments that the first operator of a pass checks, in its order."""
        return *self[:5], None if self.momentum is None else 0.0, self.residual

    def plain(self) -> "Arguments":
        """Return them with floats for real numbers that torch does not take, such as Fractions."""
        momentum, eps, _, _, slope, _ = self[5:11]
        if type(momentum) is float and type(eps) is float and type(slope) is float:
            return self
        momentum, eps, slope = map(_plain_number, (momentum, eps, slope))
        return self._replace(momentum=momentum, eps=eps, negative_slope=slope)

    def without_running(self) -> "Arguments":
        """Return them for a pass that updates nothing."""
        return self._replace(
            running_mean=None, running_var=None, num_batches_tracked=None, momentum=0.0
        )


def _plain_number(value: Any) -> Any:
    """Return a float for a real number that torch's functions do not take, such as a Fraction."""
    if isinstance(value, Real) and not isinstance(value, (int, float)):
        with contextlib.suppress(OverflowError):  # the checks of a pass raise it
            return float(value)
    return value


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Whether a value is a real number, or a tensor without dimensions that holds one."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and (value.is_floating_point() or value.dtype == torch.int64)
    return isinstance(value, Real) and not isinstance(value, bool)
