"""Layouts: outputs have the memory format that torch's batch norm gives, in every mode."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from syncbn import SyncBatchNorm
from syncbn.ops.tensors import as_dense

SIZES = (2, 3, 4, 5, 6)


def views(dim):
    """Tensors of one shape: permuted, with gaps in each dimension or in none, and expanded."""
    sizes = SIZES[:dim]
    for order in itertools.permutations(range(dim)):
        for gap in range(-1, dim):
            stored = [2 * sizes[d] if d == gap else sizes[d] for d in order]
            x = torch.arange(torch.Size(stored).numel()).float().sin().view(stored)
            x = x.permute([order.index(d) for d in range(dim)])
            if gap >= 0:
                yield x.narrow(gap, 0, sizes[gap])
                yield x[tuple(slice(None, None, 2 if d == gap else 1) for d in range(dim))]
            else:
                yield x
    for expanded in range(dim):
        stored = [1 if d == expanded else sizes[d] for d in range(dim)]
        yield torch.rand(stored).expand(sizes)


@pytest.mark.parametrize("dim", [2, 3, 4, 5])
def test_memory_format_is_that_of_torchs_output(dim):
    for x in views(dim):
        torchs = F.batch_norm(x, None, None, training=True)
        dense = as_dense(x)
        assert dense.stride() == torchs.stride(), x.stride()
        assert torch.equal(dense, x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dim", [2, 3, 4])
def test_output_of_the_layer(dim, training):
    layer = SyncBatchNorm(3).train(training)
    for x in views(dim):
        assert layer(x).stride() == F.batch_norm(x, None, None, training=True).stride()


def test_output_of_a_compiled_layer():
    """Uses of the output, such as a view, work as in evaluation."""
    torch._dynamo.reset()
    layer = torch.compile(SyncBatchNorm(50), backend="aot_eager", fullgraph=True)
    assert layer(torch.randn(8, 16, 50).transpose(1, 2)).is_contiguous()
    torch._dynamo.reset()
    layer = torch.compile(SyncBatchNorm(3), backend="aot_eager", fullgraph=True)
    for x in (torch.randn(2, 4, 5, 3).permute(0, 3, 2, 1), torch.randn(2, 4, 5, 3).movedim(-1, 1)):
        assert layer(x).stride() == F.batch_norm(x, None, None, training=True).stride()


def test_dimensions_of_size_one_do_not_affect_the_layout():
    x = torch.rand(4).as_strided((1, 2, 1, 2), (4, 1, 1, 2))
    layer = SyncBatchNorm(2)
    for training in (True, False):
        assert layer.train(training)(x).is_contiguous(memory_format=torch.channels_last)
