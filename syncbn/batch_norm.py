"""BatchNorm: the layer without synchronization, which revert makes of ours."""

from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

from syncbn._compat import BatchNormBase
from syncbn.ops import epilogue
from syncbn.pickles import RECONSTRUCTIONS, _reconstruct

is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]


class BatchNorm(BatchNormBase):
    """Batch normalization with the statistics of this process, for 2 or more dimensions.

    :func:`syncbn.revert_sync_batchnorm` makes it of a layer that was built as a SyncBatchNorm or
    has an activation of its own, which it keeps. TorchScript compiles its ``forward``.
    """

    # No defaults of the class, which would hide a module that is set in their place.
    activation: str | None
    negative_slope: float

    def extra_repr(self) -> str:
        """Return the arguments: those of torch's layer, the activation and its slope."""
        text: str = super().extra_repr()
        return text + epilogue.describe(self.activation, self.negative_slope)

    def forward(
        self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Normalize ``input``, add ``residual`` and apply the activation.

        Values where the bool ``mask``, (N, ...) or (N, 1, ...), is false count in no statistics;
        the output is 0 there.
        """
        # As torch's forward, which TorchScript cannot call from here.
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1 if mask is None else int(mask.any()))
            if self.momentum is None:  # the counter is 0 if no value has been valid yet
                momentum = 1.0 / max(float(self.num_batches_tracked), 1.0)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        positions = mask if mask is None or mask.dim() == input.dim() else mask.unsqueeze(1)
        if positions is not None:
            input = torch.where(positions, input, 0.0)
            residual = residual if residual is None else torch.where(positions, residual, 0.0)
        if positions is not None and by_batch:
            output = self._normalize_valid(input, positions, momentum)
        else:
            output = self._normalize(input, by_batch, momentum)
        if residual is not None:
            output = output + residual
        output = epilogue.activate(output, self.activation, self.negative_slope)
        return output if positions is None else torch.where(positions, output, 0.0)

    def _normalize(self, input: Tensor, by_batch: bool, momentum: float) -> Tensor:
        has_running = self.track_running_stats or not self.training
        mean = self.running_mean if has_running else None
        var = self.running_var if has_running else None
        weight, bias, eps = self.weight, self.bias, self.eps
        return F.batch_norm(input, mean, var, weight, bias, by_batch, momentum, eps)

    def _normalize_valid(self, input: Tensor, positions: Tensor, momentum: float) -> Tensor:
        """Normalize the valid values by their own statistics; the others become 0."""
        rows = input.movedim(1, -1)
        valid = positions.movedim(1, -1).expand_as(rows[..., :1]).squeeze(-1)
        output = torch.zeros_like(rows)
        values = rows[valid]
        if values.size(0) > 0:
            output[valid] = self._normalize(values, True, momentum)
        return output.movedim(-1, 1)

    def _check_input_dim(self, input: Tensor) -> None:
        # TorchScript does not look into this block, as it would with one condition for both.
        if not is_scripting():  # noqa: SIM102
            if isinstance(input, torch.fx.Proxy):  # symbolic tracing has no values to check
                return
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _reconstruct, ("reverted",), *reduced[2:]


RECONSTRUCTIONS["reverted"] = lambda: BatchNorm.__new__(BatchNorm)
