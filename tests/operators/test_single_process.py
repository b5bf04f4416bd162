"""The single-process operators give the same bits as the operators of a group."""

import pytest
import torch
from support import ops
from support.cases import DTYPES, make_input, make_vector

from syncbn.ops.epilogue import NUMBERS

pytestmark = pytest.mark.any_torch

SHAPES = [(6, 5, 7, 3), (4, 70), (3, 64, 9, 9)]


def vectors(channels):
    """Weight, bias, running_mean, running_var and num_batches_tracked."""
    made = [make_vector(channels, torch.float32, seed=seed) for seed in range(4)]
    return *made[:3], made[3].abs(), torch.tensor(3)


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_forward_is_stats_and_apply(shape, dtype, momentum):
    x = make_input(shape, "contiguous", dtype)
    ours, theirs = (copies(vectors(shape[1])) for _ in range(2))
    results = ops.batch_norm_forward(x, *ours, momentum, 1e-3)
    expected = ops.batch_norm_apply(x, ops.batch_norm_stats(x), *theirs, momentum, 1e-3)
    for a, b in zip((*results, *ours), (*expected, *theirs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", NUMBERS)
def test_backward_is_reduce_and_apply(shape, dtype, activation):
    x, residual, dy = (make_input(shape, "contiguous", dtype, seed=seed) for seed in range(3))
    weight, bias, *_ = vectors(shape[1])
    constants = None if activation is None else x.new_empty(2 * shape[1], dtype=torch.float64)
    epilogue = (NUMBERS[activation], 0.1, constants)
    normalization = (weight, bias, None, None, None, 0.1, 1e-3)
    _, mean, invstd, count = ops.batch_norm_forward(x, *normalization, residual, *epilogue)
    epilogue_gradient = (constants, NUMBERS[activation], 0.1)
    dtypes = (torch.float32, torch.float64)
    gradients = ops.batch_norm_backward(
        dy, x, mean, invstd, weight, count, *dtypes, *epilogue_gradient
    )
    sums, *of_vectors = ops.batch_norm_backward_reduce(
        dy, x, mean, invstd, *dtypes, None, *epilogue_gradient
    )
    of_input = ops.batch_norm_backward_apply(
        dy, x, mean, invstd, weight, sums, count, None, None, *epilogue_gradient
    )
    for a, b in zip(gradients, (of_input, *of_vectors), strict=True):
        assert torch.equal(a, b)
