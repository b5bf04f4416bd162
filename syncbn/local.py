"""Batch normalization of this process alone, by torch's own operator, which all tools know.

Takes any mix of dtypes that our operators take, and an ``eps`` of 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import checks

__all__ = ["batch_norm", "evaluate", "train"]


Vectors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def evaluate(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalize by the running statistics or, without them, by those of the batch."""
    vectors = _of_torchs_dtypes(input, (running_mean, running_var, weight, bias))
    return batch_norm(input, vectors, running_mean is None, momentum, eps)


def train(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Normalize by the batch and update the running statistics, as ``torch.nn.BatchNorm2d`` does.

    A ``momentum`` of None is the cumulative average and needs ``num_batches_tracked``.
    """
    share: float | Tensor = 0.0 if momentum is None else momentum
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum is None:
            share = 1 / num_batches_tracked.double()
    vectors = _of_torchs_dtypes(input, (running_mean, running_var, weight, bias))
    if running_mean is None or running_var is None:
        return batch_norm(input, vectors, True, 0.0, eps)
    if not isinstance(share, Tensor) and vectors[0] is running_mean and vectors[1] is running_var:
        return batch_norm(input, vectors, True, share, eps)
    # The operator takes no tensor for a momentum and updates no copies: it gives the batch's own.
    batch = [torch.zeros_like(v) for v in vectors[:2] if v is not None]
    output = batch_norm(input, (batch[0], batch[1], *vectors[2:]), True, 1.0, eps)
    for running, of_batch in zip((running_mean, running_var), batch, strict=True):
        old = running.double()
        running.copy_(old + (of_batch.double() - old) * share)
    return output


def _of_torchs_dtypes(input: Tensor, vectors: Vectors) -> Vectors:
    """Return the vectors as the operator takes them.

    Those are of one dtype: the input's, or float32 with a 16-bit input.
    """
    dtypes = {vector.dtype for vector in vectors if vector is not None}
    sixteen_bit = input.dtype in (torch.float16, torch.bfloat16)
    if dtypes <= {input.dtype} or (sixteen_bit and dtypes == {torch.float32}):
        return vectors
    dtype = torch.float32 if sixteen_bit else input.dtype
    mean, var, weight, bias = (None if v is None else v.to(dtype) for v in vectors)
    return mean, var, weight, bias


def batch_norm(
    input: Tensor, vectors: Vectors, training: bool, momentum: float, eps: float
) -> Tensor:
    """Call torch's operator; ``vectors`` are running_mean, running_var, weight and bias."""
    running_mean, running_var, weight, bias = vectors
    if eps == 0:  # which F.batch_norm refuses, on torch 2.15 in training alone
        if training and isinstance(input, Tensor):
            checks.check_more_than_one_value(input)
        cudnn = torch.backends.cudnn.enabled
        return torch.batch_norm(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn
        )
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
