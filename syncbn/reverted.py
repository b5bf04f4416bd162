"""The layer of a reverted model, which TorchScript can compile."""

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

from syncbn import activations
from syncbn._torch_private import BatchNormBase

__all__ = ["BatchNorm"]

is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]


def _normalize_valid(
    input: Tensor,
    places: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Return what torch's operator makes of the valid values [n, C], each at its place."""
    rows = input.movedim(1, -1)
    valid = places.movedim(1, -1).expand_as(rows[..., :1]).squeeze(-1)
    output = torch.zeros_like(rows)
    values = rows[valid]
    if values.size(0) > 0:
        output[valid] = F.batch_norm(
            values, running_mean, running_var, weight, bias, True, momentum, eps
        )
    return output.movedim(-1, 1)


class BatchNorm(BatchNormBase):
    """Batch normalization of this process alone, for 2 or more dimensions.

    Made by :func:`syncbn.revert_sync_batchnorm` of a layer that was built as a SyncBatchNorm or
    has an activation of its own, which stays.
    """

    # No defaults of the class, which would hide a module that is set in their place.
    activation: str | None
    negative_slope: float

    def extra_repr(self) -> str:
        """Return the arguments, those of torch's layer and what follows the normalization."""
        text: str = super().extra_repr()
        return text + activations.describe(self.activation, self.negative_slope)

    def forward(
        self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Normalize ``input``, add ``residual`` and apply the activation.

        Where the bool ``mask``, (N, ...) or (N, 1, ...), is false, values count in nothing, and the
        output is 0.
        """
        # As torch's forward, which TorchScript cannot call from here.
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1 if mask is None else int(mask.any()))
            if self.momentum is None:  # at 0 nothing is valid, and nothing moves
                momentum = 1.0 / max(float(self.num_batches_tracked), 1.0)
        has_running = self.track_running_stats or not self.training
        running_mean = self.running_mean if has_running else None
        running_var = self.running_var if has_running else None
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        weight, bias, eps = self.weight, self.bias, self.eps
        places = mask
        if places is not None:
            places = places if places.dim() == input.dim() else places.unsqueeze(1)
            input = torch.where(places, input, 0.0)
            residual = residual if residual is None else torch.where(places, residual, 0.0)
        if places is not None and by_batch:
            output = _normalize_valid(
                input, places, running_mean, running_var, weight, bias, momentum, eps
            )
        else:
            output = F.batch_norm(
                input, running_mean, running_var, weight, bias, by_batch, momentum, eps
            )
        if residual is not None:
            output = output + residual
        output = activations.activate(output, self.activation, self.negative_slope)
        return output if places is None else torch.where(places, output, 0.0)

    def _check_input_dim(self, input: Tensor) -> None:
        # TorchScript does not look into this block, as it would with one condition for both.
        if not is_scripting():  # noqa: SIM102
            if isinstance(input, torch.fx.Proxy):  # symbolic tracing has no values to check
                return
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
