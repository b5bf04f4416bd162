"""The statistics of all values that a layer has normalized, over many batches."""

import torch
from torch import Tensor

from syncbn import ops
from syncbn.modules import SyncBatchNorm

__all__ = ["Population"]


class Population:
    """Count, mean and sum of squared deviations of all that a layer has normalized.

    In float64 on the CPU, the same on all ranks of the layer's group. Merged by the formula of
    Chan, Golub and LeVeque (csrc/common/moments.h).
    """

    def __init__(self, layer: SyncBatchNorm) -> None:
        assert layer.running_mean is not None and layer.running_var is not None
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.channels = self.running_mean.numel()
        self.count = self.count_before = 0.0
        self.mean = torch.zeros(self.channels, dtype=torch.float64, device="cpu")
        self.m2 = torch.zeros_like(self.mean)
        self.num_batches = 0

    def add(self, totals: Tensor) -> None:
        """Merge a pass, by its sums over all ranks: of x, of x², and the count."""
        totals = totals[: 2 * self.channels + 1]
        count = totals[-1].item()
        if count == 0:
            return
        # By the operator, which subtracts without loss what can be and gives a constant channel 0.
        no_input = totals.new_empty((0, self.channels))
        mean, var = totals.new_zeros((2, self.channels))
        ops.batch_norm_apply(no_input, totals, None, None, mean, var, None, 1.0, 1.0)
        is_finite = totals[:-1].view(2, -1).isfinite().all(0)
        delta = torch.where(is_finite, mean, torch.nan) - self.mean
        share = count / (self.count + count)
        self.mean += delta * share
        self.m2 += var * max(count - 1, 1) + delta.square() * self.count * share
        self.count += count

    def end_batch(self) -> None:
        """Count a batch in which the layer has got values."""
        self.num_batches += self.count > self.count_before
        self.count_before = self.count

    def write(self) -> str:
        """Write the layer's running statistics; return what has been left as it was, if anything.

        A channel whose statistics are not finite in the dtype of the buffers stays.
        """
        if self.count == 0:
            return "no values"
        with torch.no_grad():
            var = self.m2 / max(self.count - 1, 1)
            # First the dtype: the device may have no float64.
            mean = self.mean.to(self.running_mean.dtype).to(self.running_mean.device)
            var = var.to(self.running_var.dtype).to(self.running_var.device)
            is_finite = mean.isfinite() & var.isfinite()
            self.running_mean.copy_(torch.where(is_finite, mean, self.running_mean))
            self.running_var.copy_(torch.where(is_finite, var, self.running_var))
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.fill_(self.num_batches)
        num_left = int((~is_finite).sum())
        return f"{num_left} of {self.channels} channels, not finite" if num_left else ""
