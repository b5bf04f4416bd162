"""Batch normalization in a single process by torch's own operator: evaluation and export.

Takes any mix of dtypes that our operators take, and an ``eps`` of 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn.ops.arguments import Arguments


def evaluate(input: Tensor, arguments: Arguments) -> Tensor:
    """Normalize by the running statistics or, without them, by the batch's."""
    arguments = _in_torchs_dtypes(input, arguments)
    return batch_norm(input, arguments, training=arguments.running_mean is None)


def train(input: Tensor, arguments: Arguments) -> Tensor:
    """Normalize by the batch and update the running statistics, as torch's layers do."""
    momentum, counter = arguments.momentum, arguments.num_batches_tracked
    share: float | Tensor = 0.0 if momentum is None else momentum
    if counter is not None:
        counter.add_(1)
        if momentum is None:
            share = 1 / counter.to(torch.float64)
    running_mean, running_var = arguments.running_mean, arguments.running_var
    own = _in_torchs_dtypes(input, arguments)
    if running_mean is None or running_var is None:
        return batch_norm(input, own._replace(momentum=0.0), training=True)
    are_copies = own.running_mean is not running_mean or own.running_var is not running_var
    if not are_copies and not isinstance(share, Tensor):
        return batch_norm(input, own, training=True)
    # The operator takes no tensor for a momentum and updates no copies: it gives the batch's own.
    mean, var = [torch.zeros_like(v) for v in own.vectors[2:] if v is not None]
    of_batch = own._replace(running_mean=mean, running_var=var, momentum=1.0)
    output = batch_norm(input, of_batch, training=True)
    for running, batch in ((running_mean, mean), (running_var, var)):
        old = running.to(torch.float64)
        running.copy_(old + (batch.to(old.dtype) - old) * share)
    return output


def _in_torchs_dtypes(input: Tensor, arguments: Arguments) -> Arguments:
    """Return the arguments with vectors of one dtype, as the operator takes them.

    That is the input's, or float32 with a 16-bit input.
    """
    vectors = arguments.vectors
    dtypes = {vector.dtype for vector in vectors if vector is not None}
    sixteen_bit = input.dtype in (torch.float16, torch.bfloat16)
    if dtypes <= {input.dtype} or (sixteen_bit and dtypes == {torch.float32}):
        return arguments
    dtype = torch.float32 if sixteen_bit else input.dtype
    weight, bias, mean, var = [None if v is None else v.to(dtype) for v in vectors]
    return arguments._replace(weight=weight, bias=bias, running_mean=mean, running_var=var)


def batch_norm(input: Tensor, arguments: Arguments, *, training: bool) -> Tensor:
    """Call torch's operator."""
    weight, bias, running_mean, running_var, _, momentum, eps, *_ = arguments
    momentum = 0.0 if momentum is None else momentum
    if eps == 0:  # which F.batch_norm refuses, on torch 2.15 in training alone
        if training and isinstance(input, Tensor) and input.numel() == input.size(1):
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{input.size()}"
            )
        cudnn = torch.backends.cudnn.enabled
        return torch.batch_norm(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn
        )
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
