"""The layer of a reverted model, which TorchScript can compile."""

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

from syncbn import activations
from syncbn._torch_private import BatchNormBase

__all__ = ["BatchNorm"]

is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]


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

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalize ``input``, add ``residual`` and apply the activation."""
        # As torch's forward, which TorchScript cannot call from here.
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        has_running = self.track_running_stats or not self.training
        output = F.batch_norm(
            input,
            self.running_mean if has_running else None,
            self.running_var if has_running else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            momentum,
            self.eps,
        )
        if residual is not None:
            output = output + residual
        return activations.activate(output, self.activation, self.negative_slope)

    def _check_input_dim(self, input: Tensor) -> None:
        # TorchScript does not look into this block, as it would with one condition for both.
        if not is_scripting():  # noqa: SIM102
            if isinstance(input, torch.fx.Proxy):  # symbolic tracing has no values to check
                return
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
