"""Writes to tensors that autograd has saved, by the layer and by others."""

import pytest
import torch
from support.cases import make_mask
from support.fusing import FUSED
from torch.autograd.graph import allow_mutation_on_saved_tensors

from syncbn import SyncBatchNorm, recompute_statistics

SHAPE = (4, 3, 5, 5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}, {"affine": False}])
@pytest.mark.parametrize(("activation", "with_residual"), [(None, False), *FUSED])
def test_mutation_of_saved_tensors_can_be_allowed(activation, with_residual, options, masked):
    torch.manual_seed(0)
    x, residual = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    mask = make_mask(x) if masked else None
    results = []
    for allowed in (True, False):
        layer = SyncBatchNorm(3, activation=activation, **options)
        with allow_mutation_on_saved_tensors():
            h, r = x * 2, residual.clone()
            y = layer(h, r if with_residual else None, mask)
            loss = (y * x.detach()).sum()
            if allowed:
                for saved in (h, r, y):
                    saved.detach().zero_()
            results.append(torch.autograd.grad(loss, (x, *layer.parameters())))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_running_statistics_that_an_evaluation_saved_can_be_written():
    x = torch.randn(SHAPE, requires_grad=True)
    gradients = []
    for trains in (True, False):
        layer = SyncBatchNorm(3)
        with allow_mutation_on_saved_tensors():
            loss = layer.eval()(x).pow(3).sum()
            if trains:
                layer.train()(x.detach() * 5 + 7)
            gradients.append(torch.autograd.grad(loss, (x, *layer.parameters())))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_statistics_are_recomputed_under_allowed_mutation():
    layer, x = SyncBatchNorm(3), torch.rand(4, 3)
    with allow_mutation_on_saved_tensors():
        recompute_statistics(layer, [x])
    torch.testing.assert_close(layer.running_mean, x.mean(0))
